//! Consumes a queue so that every message's effect happens once.

pub mod broker;
mod message;

pub use broker::{Broker, BrokerError, BrokerErrorKind, DeadLetter, Delivery, Reason, Subscription};
pub use message::Message;
