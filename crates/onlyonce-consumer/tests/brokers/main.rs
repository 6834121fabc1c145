//! The adapters against real brokers: what the seam promises, one test a clause, and what is each broker's own.

#![allow(clippy::unwrap_used)]

mod nats;
mod queue;
mod rabbitmq;
#[macro_use]
mod suite;

suite!(on_rabbitmq, crate::rabbitmq::RabbitQueue);
suite!(on_nats, crate::nats::NatsQueue);
