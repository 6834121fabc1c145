//! A decorator that lets no call fail passes the suite; one that does fails calls as it says.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Fault, Faulty, Harness, MemoryHarness};
use onlyonce_core::{Key, Operation, Store, StoreErrorKind};

struct Decorated(MemoryHarness);

#[async_trait]
impl Harness for Decorated {
    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(Faulty::new(self.0.store().await, Fault::LostBefore, 0..0))
    }

    async fn other(&self) -> Arc<dyn Store> {
        Arc::new(Faulty::new(self.0.other().await, Fault::LostAfter, 7..7))
    }

    async fn pass(&self, time: Duration) {
        self.0.pass(time).await;
    }
}

onlyonce_conformance::suite!(Decorated(MemoryHarness::new()));

#[tokio::test]
async fn a_fault_strikes_where_it_says() {
    let store = MemoryHarness::new().store().await;
    for (fault, kind, applied) in [
        (Fault::Refused, StoreErrorKind::Unavailable, false),
        (Fault::LostBefore, StoreErrorKind::Ambiguous, false),
        (Fault::LostAfter, StoreErrorKind::Ambiguous, true),
    ] {
        let payment = Operation::new("", "", format!("{fault:?}"), Key::new("k").expect("a key"));
        let faulty = Faulty::new(Arc::clone(&store), fault, 1..2);
        assert!(faulty.read(payment.id()).await.is_ok());
        let fingerprint = onlyonce_core::Fingerprint { target: [0; 32], body: [0; 32] };
        let policy = onlyonce_core::Policy {
            lease: Duration::from_secs(60),
            retention: Duration::from_secs(60),
            on_lapse: onlyonce_core::Lapse::Rerun,
        };
        let write = onlyonce_core::machine::grant(fingerprint, onlyonce_core::Revision(1), &policy);
        let error = faulty.insert(&payment, write).await.expect_err("the second call fails");
        assert_eq!(error.kind(), kind, "{fault:?}");
        let seen = faulty.read(payment.id()).await.expect("the third call does not");
        assert_eq!(seen.is_some(), applied, "{fault:?}");
        assert_eq!(faulty.calls(), 3);
    }
}
