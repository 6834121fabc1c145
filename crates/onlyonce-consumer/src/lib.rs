//! Consumes a queue so that every message's effect happens once, whatever is delivered again, killed or cut.
//!
//! A [`Consumer`] takes messages from a [`Broker`], has a [`Handler`] process each in an open database transaction, and
//! commits that together with the record that the message is done. It is built on [`onlyonce::inbox`].
//!
//! # What happens to a message
//!
//! 1. Its id is [where the settings say](MessageId). Without one it is dead-lettered: a made-up id would make every copy
//!    another message.
//! 2. The attempt is counted, in a commit of its own, before anything else is done. So a message that kills its worker
//!    is known, and dead-lettered after [`attempts_max`](Settings::attempts_max).
//! 3. If it was processed before, and that is committed, it is acknowledged. If another worker is at it, it is put back
//!    for later. If its id was used for another payload it is dead-lettered.
//! 4. The handler writes in the transaction. Meanwhile the message stays held, and the broker's deadline is extended.
//! 5. When the handler is done, its result is recorded in the same transaction, that is committed, and only then is the
//!    message acknowledged.
//! 6. Otherwise the transaction is rolled back. The message is put back for later, or is dead-lettered: at its last
//!    attempt, or because the handler said that it [can never be processed](NotDone::Failed).
//!
//! A database that is away is waited for: nothing is acknowledged, and no attempt is counted, but for one whose count was
//! being written when the database went. A broker that is away is connected to again and again.
//!
//! # Deployment
//!
//! - Everything that the handler changes must be written through its transaction. What it does elsewhere can happen
//!   again: give it a [downstream key](Delivered::downstream).
//! - Messages come in any order, and several at a time.
//! - The broker's own limit on deliveries must be off, or far above [`attempts_max`](Settings::attempts_max): it also
//!   counts what was put back because another worker was at it.
//! - [`InboxConfig::retention`] must exceed the time in which a message can come again. Where the broker tells that time,
//!   a shorter retention is refused.
//! - A message in the dead-letter queue is remembered as failed. Before it is sent again: `onlyonce inbox release ID`.
//!
//! # Example
//!
//! ```no_run
//! use onlyonce_consumer::rabbitmq::RabbitMq;
//! use onlyonce_consumer::{Consumer, MessageId, NotDone, Settings};
//! use onlyonce_postgres::PostgresStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
//! let store = PostgresStore::open(&"postgres://localhost/shop".parse()?).await?.transactions(&pool).await?;
//! let orders = RabbitMq::new("amqp://localhost", "orders")?;
//! let settings = Settings { message_id: MessageId::header("order-id"), ..Settings::default() };
//! let stop = async { drop(tokio::signal::ctrl_c().await) };
//!
//! let consumer = Consumer::new(orders, store, "billing", settings)?;
//! consumer
//!     .run_fn(stop, |tx, message| {
//!         Box::pin(async move {
//!             // A payload that is no number can never be processed: it is dead-lettered, with this as the reason.
//!             let amount: i64 = message.json()?;
//!             if amount < 0 {
//!                 return Err(NotDone::failed("the amount is negative"));
//!             }
//!             // Any other error has the message rolled back, and delivered again later.
//!             let insert = sqlx::query("INSERT INTO payments (id, amount) VALUES ($1, $2)");
//!             insert.bind(message.id()).bind(amount).execute(&mut **tx).await?;
//!             // Committed with the record that the message is done, and acknowledged after that.
//!             Ok(())
//!         })
//!     })
//!     .await?;
//! # Ok(())
//! # }
//! ```

pub mod broker;
mod handler;
mod message;
pub mod metric;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
mod runner;
mod settings;
mod work;

pub use broker::{Broker, BrokerError, BrokerErrorKind, DeadLetter, Delivery, Reason, Subscription};
pub use handler::{Delivered, Handler};
pub use message::Message;
pub use onlyonce::{InboxConfig, NotDone, SettingsError};
pub use runner::{Consumer, ConsumerError};
pub use settings::{FindId, MessageId, Settings};
