//! The open transaction on its way to the handler and back.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Extensions;
use onlyonce_core::Transactional;

/// The open transaction of a request, as its handler gets it. Dropping it hands it back: whether it is
/// committed is decided by the handler's answer.
///
/// It dereferences to the store's transaction, so that with sqlx a query is executed by `&mut **tx`.
pub struct Tx<T: Transactional> {
    /// Always there until it is dropped.
    transaction: Option<T::Transaction>,
    slot: Slot<T>,
}

/// Where the transaction is while the handler does not have it.
pub(crate) struct Slot<T: Transactional> {
    place: Arc<Mutex<Option<T::Transaction>>>,
}

impl<T: Transactional> Slot<T> {
    pub(crate) fn new(transaction: T::Transaction) -> Self {
        Self { place: Arc::new(Mutex::new(Some(transaction))) }
    }

    /// The transaction, unless somebody else has it.
    pub(crate) fn take(&self) -> Option<T::Transaction> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<T::Transaction>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Transactional> Clone for Slot<T> {
    fn clone(&self) -> Self {
        Self { place: Arc::clone(&self.place) }
    }
}

impl<T: Transactional> Tx<T> {
    /// Takes the transaction of the request that has these extensions.
    ///
    /// # Errors
    /// If the request has none on this store, or somebody has it already.
    pub fn take(extensions: &Extensions) -> Result<Self, NoTransaction> {
        let slot = extensions.get::<Slot<T>>().ok_or(NoTransaction::NotCovered)?;
        let transaction = slot.take().ok_or(NoTransaction::Taken)?;
        Ok(Self { transaction: Some(transaction), slot: slot.clone() })
    }
}

impl<T: Transactional> Deref for Tx<T> {
    type Target = T::Transaction;

    fn deref(&self) -> &T::Transaction {
        self.transaction.as_ref().expect("handed back only when dropped")
    }
}

impl<T: Transactional> DerefMut for Tx<T> {
    fn deref_mut(&mut self) -> &mut T::Transaction {
        self.transaction.as_mut().expect("handed back only when dropped")
    }
}

impl<T: Transactional> Drop for Tx<T> {
    fn drop(&mut self) {
        *self.slot.lock() = self.transaction.take();
    }
}

impl<T: Transactional> fmt::Debug for Tx<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tx")
    }
}

/// Why a handler gets no transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoTransaction {
    /// No [`TransactionalLayer`](crate::TransactionalLayer) on this store covers the request: there is none
    /// around the route, or no rule covers the method and path.
    NotCovered,
    /// It was taken before and is not back yet.
    Taken,
}

impl fmt::Display for NoTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotCovered => {
                "no transaction was opened for this request: put a TransactionalLayer around its route, and a rule \
                 that covers its method"
            }
            Self::Taken => "the request's transaction is already in use; take it once",
        })
    }
}

impl std::error::Error for NoTransaction {}
