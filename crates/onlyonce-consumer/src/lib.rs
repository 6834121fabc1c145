//! Consumes a queue so that every message's effect happens once.

pub mod broker;
mod message;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;

pub use broker::{Broker, BrokerError, BrokerErrorKind, DeadLetter, Delivery, Reason, Subscription};
pub use message::Message;
