//! Compare and swap, one call at a time.

use onlyonce_core::store::{Inserted, Replaced};

use crate::Harness;
use crate::samples::*;

/// An insert under an id that has no record writes one.
pub async fn an_insert_writes_where_there_is_nothing(harness: &dyn Harness) {
    let (store, payment, write) = (harness.store().await, operation("k"), running());
    let at = insert(&*store, &payment, &write).await;
    assert_eq!(record(&*store, payment.id()).await, write.at(at));
}

/// An insert over a record writes nothing and tells what is there.
pub async fn an_insert_tells_what_is_there(harness: &dyn Harness) {
    let (store, payment, first) = (harness.store().await, operation("k"), done(outcome("paid")));
    let at = insert(&*store, &payment, &first).await;
    match store.insert(&payment, running()).await.expect("the store answers") {
        Inserted::Exists(seen) => assert_eq!(seen.record, first.clone().at(at)),
        Inserted::New(at) => panic!("inserted a second time, at {at:?}"),
    }
    assert_eq!(record(&*store, payment.id()).await, first.at(at));
}

/// An insert over an expired record tells of it: expiry is decided elsewhere.
pub async fn an_insert_tells_of_an_expired_record(harness: &dyn Harness) {
    let (store, payment, first) = (harness.store().await, operation("k"), expired());
    insert(&*store, &payment, &first).await;
    match store.insert(&payment, running()).await.expect("the store answers") {
        Inserted::Exists(seen) => {
            assert_eq!(seen.record.revision, first.revision);
            assert!(seen.record.expires_at <= seen.now);
        }
        Inserted::New(at) => panic!("an expired record was written over, at {at:?}"),
    }
}

/// A key that was removed can be inserted again.
pub async fn an_insert_follows_a_removal(harness: &dyn Harness) {
    let (store, payment, first, second) = (harness.store().await, operation("k"), running(), running());
    insert(&*store, &payment, &first).await;
    assert!(store.remove(payment.id(), first.revision).await.expect("the store removes"));
    let at = insert(&*store, &payment, &second).await;
    assert_eq!(record(&*store, payment.id()).await, second.at(at));
}

/// A replace that names the stored revision writes.
pub async fn a_replace_writes_over_the_expected_revision(harness: &dyn Harness) {
    let (store, payment, first) = (harness.store().await, operation("k"), running());
    insert(&*store, &payment, &first).await;
    let second = done(outcome("paid"));
    let at = replace(&*store, payment.id(), first.revision, &second).await;
    assert_eq!(record(&*store, payment.id()).await, second.at(at));
}

/// A replace that names another revision writes nothing and tells what is there.
pub async fn a_replace_with_another_revision_loses(harness: &dyn Harness) {
    let (store, payment, first) = (harness.store().await, operation("k"), done(outcome("paid")));
    let at = insert(&*store, &payment, &first).await;
    let lost = store.replace(payment.id(), fresh_revision(), running()).await.expect("the store answers");
    let Replaced::Lost(Some(seen)) = lost else { panic!("{lost:?}") };
    assert_eq!(seen.record, first.clone().at(at));
    assert_eq!(record(&*store, payment.id()).await, first.at(at));
}

/// A replace of a record that is not there writes nothing and says so.
pub async fn a_replace_of_nothing_loses(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let lost = store.replace(payment.id(), fresh_revision(), running()).await.expect("the store answers");
    assert_eq!(lost, Replaced::Lost(None));
    assert_eq!(read(&*store, payment.id()).await, None);
}

/// A replace asks for the revision and for nothing else: an expired record is replaced too.
pub async fn a_replace_writes_over_an_expired_record(harness: &dyn Harness) {
    let (store, payment, first, second) = (harness.store().await, operation("k"), expired(), running());
    insert(&*store, &payment, &first).await;
    harness.pass(std::time::Duration::from_millis(5)).await;
    let at = replace(&*store, payment.id(), first.revision, &second).await;
    assert_eq!(record(&*store, payment.id()).await, second.at(at));
}

/// A remove that names the stored revision takes the record away.
pub async fn a_remove_takes_the_expected_revision(harness: &dyn Harness) {
    let (store, payment, write) = (harness.store().await, operation("k"), running());
    insert(&*store, &payment, &write).await;
    assert!(store.remove(payment.id(), write.revision).await.expect("the store removes"));
    assert_eq!(read(&*store, payment.id()).await, None);
}

/// A remove that names another revision takes nothing.
pub async fn a_remove_with_another_revision_takes_nothing(harness: &dyn Harness) {
    let (store, payment, write) = (harness.store().await, operation("k"), running());
    insert(&*store, &payment, &write).await;
    assert!(!store.remove(payment.id(), fresh_revision()).await.expect("the store answers"));
    assert_eq!(record(&*store, payment.id()).await.revision, write.revision);
}

/// A remove of a record that is not there is `false`.
pub async fn a_remove_of_nothing_is_false(harness: &dyn Harness) {
    let store = harness.store().await;
    assert!(!store.remove(operation("k").id(), fresh_revision()).await.expect("the store answers"));
}

/// A read of a record that is not there is `None`.
pub async fn a_read_of_nothing_is_none(harness: &dyn Harness) {
    assert_eq!(read(&*harness.store().await, operation("k").id()).await, None);
}

/// A read tells of an expired record as of any other.
pub async fn a_read_tells_of_an_expired_record(harness: &dyn Harness) {
    let (store, payment, write) = (harness.store().await, operation("k"), expired());
    insert(&*store, &payment, &write).await;
    assert_eq!(record(&*store, payment.id()).await.revision, write.revision);
}

/// A revision that was replaced or removed never matches again.
pub async fn a_used_revision_never_matches_again(harness: &dyn Harness) {
    let (store, payment, first, second) = (harness.store().await, operation("k"), running(), running());
    insert(&*store, &payment, &first).await;
    replace(&*store, payment.id(), first.revision, &second).await;
    assert!(!store.remove(payment.id(), first.revision).await.expect("the store answers"));
    assert!(store.remove(payment.id(), second.revision).await.expect("the store removes"));
    insert(&*store, &payment, &running()).await;
    for old in [first.revision, second.revision] {
        let lost = store.replace(payment.id(), old, running()).await.expect("the store answers");
        assert!(matches!(lost, Replaced::Lost(Some(_))), "{lost:?}");
    }
}

/// What one handle has written every other sees at once.
pub async fn another_handle_sees_every_write(harness: &dyn Harness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let (first, second) = (running(), done(outcome("paid")));
    insert(&*store, &payment, &first).await;
    assert_eq!(record(&*other, payment.id()).await.revision, first.revision);
    assert!(matches!(other.insert(&payment, running()).await, Ok(Inserted::Exists(_))));
    replace(&*other, payment.id(), first.revision, &second).await;
    assert_eq!(record(&*store, payment.id()).await.revision, second.revision);
    assert!(store.remove(payment.id(), second.revision).await.expect("the store removes"));
    assert_eq!(read(&*other, payment.id()).await, None);
}

/// A call on one id leaves every other as it is.
pub async fn ids_never_interfere(harness: &dyn Harness) {
    let (store, ann, bob) = (harness.store().await, operation("ann"), operation("bob"));
    let (for_ann, for_bob) = (running(), done(outcome("bob's")));
    insert(&*store, &ann, &for_ann).await;
    let at = insert(&*store, &bob, &for_bob).await;
    // Even when it names the other's revision.
    let lost = store.replace(ann.id(), for_bob.revision, running()).await.expect("the store answers");
    assert!(matches!(lost, Replaced::Lost(Some(_))), "{lost:?}");
    assert!(!store.remove(ann.id(), for_bob.revision).await.expect("the store answers"));
    replace(&*store, ann.id(), for_ann.revision, &running()).await;
    assert_eq!(record(&*store, bob.id()).await, for_bob.at(at));
}
