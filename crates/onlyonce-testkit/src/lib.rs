//! Private Postgres, PgBouncer, RabbitMQ, NATS and nginx servers, a TCP proxy that misbehaves, and examples as
//! processes, for tests and measurements.
//!
//! Servers listen on 127.0.0.1 only, keep their files in a temporary folder, and end with the process that
//! started them, however that ends. What is missing is installed where that is possible (as root, with
//! apt-get); otherwise the test fails with the reason. Nothing is ever skipped.

mod example;
mod nats;
mod nginx;
mod pgbouncer;
mod postgres;
mod program;
mod proxy;
mod rabbitmq;
mod system;

pub use example::{Curl, Example};
pub use nats::Nats;
pub use nginx::Nginx;
pub use pgbouncer::PgBouncer;
pub use postgres::Postgres;
pub use proxy::Proxy;
pub use rabbitmq::RabbitMq;
