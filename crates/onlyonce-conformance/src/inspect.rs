//! Listing.

use std::collections::HashSet;
use std::time::Duration;

use onlyonce_core::store::{Entry, Filter};
use onlyonce_core::{Id, Inspect, Key, Operation};

use crate::InspectHarness;
use crate::samples::*;

async fn list(store: &dyn Inspect, filter: &Filter) -> Vec<Entry> {
    store.list(filter, 1_000).await.expect("the store lists")
}

fn keys(entries: &[Entry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.operation.key().as_str()).collect()
}

fn ids(entries: &[Entry]) -> HashSet<Id> {
    entries.iter().map(|entry| entry.operation.id()).collect()
}

/// There is nothing to list where nothing was written.
pub async fn an_empty_store_lists_nothing(harness: &dyn InspectHarness) {
    let look = harness.inspect().await;
    assert_eq!(list(&*look, &Filter::default()).await, []);
    assert_eq!(list(&*look, &Filter { key: Some("k".into()), ..Filter::default() }).await, []);
}

/// Running, done and expired records are listed, each with its parts, its fields and the store's clock.
pub async fn records_are_listed_whole(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    for (key, write) in [("running", running()), ("done", done(outcome("paid"))), ("expired", expired())] {
        let payment = operation(key);
        let at = insert(&*store, &payment, &write).await;
        let entries = list(&*look, &Filter { id: Some(payment.id()), ..Filter::default() }).await;
        let [entry] = &entries[..] else { panic!("{entries:?}") };
        assert_eq!((&entry.operation, &entry.record), (&payment, &write.at(at)));
        assert!(entry.now >= at);
    }
    assert_eq!(list(&*look, &Filter::default()).await.len(), 3);
}

/// The parts of an identity come back as they were written, whatever they contain.
pub async fn any_text_is_listed_as_written(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    let long = "x".repeat(20_000);
    for text in ["", " ", "'", "\"; --", "\0", "a\0b", "é\u{1f980}\u{202e}", "\n\t", &long] {
        let payment = Operation::new(text, text, text, Key::new("k'\"%").expect("a key"));
        insert(&*store, &payment, &running()).await;
        let part = || Some(text.to_owned());
        let filter = Filter { namespace: part(), endpoint: part(), caller: part(), ..Filter::default() };
        let entries = list(&*look, &filter).await;
        assert_eq!(entries.iter().map(|entry| &entry.operation).collect::<Vec<_>>(), [&payment], "{text:?}");
    }
}

/// Records of one retention are listed in the order in which they were created.
pub async fn the_oldest_comes_first(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    for key in ["c", "a", "d", "b"] {
        insert(&*store, &operation(key), &running()).await;
        harness.pass(Duration::from_millis(5)).await;
    }
    assert_eq!(keys(&list(&*look, &Filter::default()).await), ["c", "a", "d", "b"]);
}

/// A record that changes between two pages may be met twice, and is never missed.
pub async fn what_changes_is_not_missed(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    let mut written = Vec::new();
    for key in ["a", "b", "c", "d", "e", "f"] {
        let write = running();
        let at = insert(&*store, &operation(key), &write).await;
        written.push((operation(key), write.revision, at));
        harness.pass(Duration::from_millis(5)).await;
    }
    let (mut met, mut after) = (HashSet::new(), None);
    for (payment, revision, at) in written.iter().rev().take(3) {
        // Expires sooner than while it ran, and sooner than those before it.
        let completed = onlyonce_core::Write {
            created_at: Some(*at),
            retention: Duration::from_secs(1),
            ..done(outcome("paid"))
        };
        let page = look.page(&Filter::default(), after.as_ref(), 1).await.expect("the store lists");
        met.extend(ids(&page.entries));
        after = page.next;
        replace(&*store, payment.id(), *revision, &completed).await;
    }
    let rest = look.page(&Filter::default(), after.as_ref(), 100).await.expect("the store lists");
    met.extend(ids(&rest.entries));
    assert_eq!(met, written.iter().map(|(payment, ..)| payment.id()).collect());
}

/// Page after page visits each record once, those created in the same moment among them.
pub async fn pages_visit_each_record_once(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    let mut written = HashSet::new();
    for at in 0..23 {
        let payment = operation(&format!("k{at}"));
        let together =
            onlyonce_core::Write { created_at: Some(onlyonce_core::Timestamp(1_000 + at / 5)), ..running() };
        insert(&*store, &payment, &together).await;
        written.insert(payment.id());
    }
    for rows_max in [1, 3, 23, 100] {
        let (mut visited, mut after) = (Vec::new(), None);
        loop {
            let page =
                look.page(&Filter::default(), after.as_ref(), rows_max).await.expect("the store lists");
            assert!(page.entries.len() <= rows_max as usize);
            visited.extend(page.entries.iter().map(|entry| entry.operation.id()));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(visited.len(), written.len(), "{rows_max} a page");
        assert_eq!(visited.into_iter().collect::<HashSet<_>>(), written);
    }
}

/// A page has no more rows than asked for.
pub async fn no_more_rows_than_asked(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    for key in ["a", "b", "c"] {
        insert(&*store, &operation(key), &running()).await;
    }
    for (rows_max, rows) in [(0, 0), (1, 1), (2, 2), (3, 3), (u32::MAX, 3)] {
        let page = look.list(&Filter::default(), rows_max).await.expect("the store lists");
        assert_eq!(page.len(), rows);
    }
}

/// Two values for each of the four parts.
async fn sixteen(harness: &dyn InspectHarness) -> Vec<Operation> {
    let store = harness.store().await;
    let mut all = Vec::new();
    for at in 0..16_u8 {
        let part = |bit: u8| if at >> bit & 1 == 0 { "one" } else { "two" };
        let operation = Operation::new(part(0), part(1), part(2), Key::new(part(3)).expect("a key"));
        insert(&*store, &operation, &running()).await;
        all.push(operation);
    }
    all
}

/// Each field of a filter selects by that field alone.
pub async fn each_filter_selects(harness: &dyn InspectHarness) {
    let (all, look) = (sixteen(harness).await, harness.inspect().await);
    let two = || Some("two".to_owned());
    type Part = fn(&Operation) -> &str;
    let filters: [(Filter, Part); 4] = [
        (Filter { namespace: two(), ..Filter::default() }, |operation| operation.namespace()),
        (Filter { endpoint: two(), ..Filter::default() }, |operation| operation.endpoint()),
        (Filter { caller: two(), ..Filter::default() }, |operation| operation.caller()),
        (Filter { key: two(), ..Filter::default() }, |operation| operation.key().as_str()),
    ];
    for (filter, part) in filters {
        let expected = all.iter().filter(|operation| part(operation) == "two").map(Operation::id).collect();
        assert_eq!(ids(&list(&*look, &filter).await), expected, "{filter:?}");
    }
    for operation in &all {
        let filter = Filter { id: Some(operation.id()), ..Filter::default() };
        assert_eq!(ids(&list(&*look, &filter).await), HashSet::from([operation.id()]));
    }
}

/// Of several fields all must match, in every page.
pub async fn filters_add_up(harness: &dyn InspectHarness) {
    let (all, look) = (sixteen(harness).await, harness.inspect().await);
    let (one, two) = (Some("one".to_owned()), Some("two".to_owned()));
    let filter = Filter { namespace: two, key: one, ..Filter::default() };
    let matches =
        |operation: &&Operation| operation.namespace() == "two" && operation.key().as_str() == "one";
    let expected: HashSet<Id> = all.iter().filter(matches).map(Operation::id).collect();
    let first = look.page(&filter, None, 3).await.expect("the store lists");
    let rest = look.page(&filter, first.next.as_ref(), 3).await.expect("the store lists");
    assert_eq!((first.entries.len(), rest.entries.len()), (3, 1));
    assert_eq!(&ids(&first.entries) | &ids(&rest.entries), expected);
    let nothing = Filter { id: Some(all[0].id()), key: Some("two".to_owned()), ..Filter::default() };
    assert_eq!(list(&*look, &nothing).await, []);
}

/// A filter is compared byte for byte: no wildcards, no folding of case, no trimming.
pub async fn a_filter_is_no_pattern(harness: &dyn InspectHarness) {
    let (store, look) = (harness.store().await, harness.inspect().await);
    insert(&*store, &operation("key"), &running()).await;
    for near in ["%", "k%", "k_y", "*", "KEY", "key ", "ke", ""] {
        let filter = Filter { key: Some(near.to_owned()), ..Filter::default() };
        assert_eq!(list(&*look, &filter).await, [], "{near:?}");
    }
}
