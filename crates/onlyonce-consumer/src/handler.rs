//! What is called for each message.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use onlyonce::{Downstream, Execution, NotDone};
use onlyonce_core::Transactional;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::Message;

/// Processes messages, each in an open transaction.
///
/// What it writes in the transaction is committed with the record that the message is done, or not at all. It may be
/// called again for the same message after it was rolled back, so whatever it does elsewhere needs a
/// [downstream key](Delivered::downstream).
pub trait Handler<T: Transactional>: Send + Sync + 'static {
    /// What is recorded of a message that is done, in JSON; `()` where there is nothing to tell.
    type Output: Serialize + Send + 'static;

    /// Processes one message. The transaction is committed and rolled back by whoever calls.
    ///
    /// # Errors
    /// If it is not done: see [`NotDone`]. With `?` any error is one to retry later.
    fn handle(
        &self,
        transaction: &mut T::Transaction,
        message: &Delivered,
    ) -> impl Future<Output = Result<Self::Output, NotDone>> + Send;
}

/// A closure as a [`Handler`]; see [`Consumer::run_fn`](crate::Consumer::run_fn).
pub(crate) struct HandlerFn<F>(pub(crate) F);

impl<T, F, R> Handler<T> for HandlerFn<F>
where
    T: Transactional,
    F: for<'a> Fn(&'a mut T::Transaction, &'a Delivered) -> BoxFuture<'a, Result<R, NotDone>>
        + Send
        + Sync
        + 'static,
    R: Serialize + Send + 'static,
{
    type Output = R;

    async fn handle(&self, transaction: &mut T::Transaction, message: &Delivered) -> Result<R, NotDone> {
        (self.0)(transaction, message).await
    }
}

/// A message on its way to the handler.
#[derive(Clone, Debug)]
pub struct Delivered {
    pub(crate) id: String,
    pub(crate) message: Arc<Message>,
    pub(crate) execution: Execution,
}

impl Delivered {
    /// The id by which it is told from others.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// All that the broker delivered.
    #[must_use]
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// The payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.message.payload
    }

    /// The payload, read as JSON.
    ///
    /// # Errors
    /// [`NotDone::Failed`], if it is not a `D`: no retry would change that.
    pub fn json<D: DeserializeOwned>(&self) -> Result<D, NotDone> {
        serde_json::from_slice(self.payload())
            .map_err(|error| NotDone::failed(format!("the payload cannot be read: {error}")))
    }

    /// Which attempt this is, as counted before it began; the first is 1. What an earlier one wrote in its transaction
    /// was rolled back.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.execution.attempt
    }

    /// The key of the side effect that the handler calls `label`, for its provider to dedupe on; the same on every
    /// attempt. See [`onlyonce_core::downstream`].
    #[must_use]
    pub fn downstream(&self, label: &str) -> Downstream {
        self.execution.downstream(label)
    }
}
