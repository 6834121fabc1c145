//! The suite that every Onlyonce store passes, one test per clause.
//!
//! A backend implements [`Harness`] and expands [`suite!`]; each clause is then a test of its own name.
//! One that keeps keys for people to look at also implements [`InspectHarness`] and expands
//! [`inspect_suite!`]; one that can claim inside its user's transaction implements [`TransactHarness`] and
//! expands [`transact_suite!`]. The crate that does so needs `tokio` with `macros` and `rt-multi-thread`.
//!
//! ```
//! mod memory {
//!     use onlyonce_conformance::MemoryHarness;
//!
//!     onlyonce_conformance::suite!(MemoryHarness::new());
//!     onlyonce_conformance::inspect_suite!(MemoryHarness::new());
//! }
//! # fn main() {}
//! ```
//!
//! | module | clauses about |
//! |---|---|
//! | [`register`] | compare and swap, one call at a time |
//! | [`bytes`] | every field comes back as it was written |
//! | [`clock`] | durations, and the store's idea of now |
//! | [`sweep`] | freeing space |
//! | [`races`] | many calls at once, over two handles |
//! | [`engine`] | what callers of [`onlyonce_core::Engine`] rely on |
//! | [`faults`] | the same when any call fails, see [`Faulty`] |
//! | [`inspect`] | listing |
//! | [`transact`] | claims inside the user's own transaction, for stores that are [`Transactional`] |

pub mod bytes;
pub mod clock;
pub mod engine;
pub mod faults;
mod faulty;
pub mod inspect;
mod memory;
pub mod races;
pub mod register;
mod samples;
pub mod sweep;
pub mod transact;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{Inspect, Store, Transactional};

pub use faulty::{Fault, Faulty};
pub use memory::MemoryHarness;

/// A fresh, empty store for one clause.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// A handle on this harness's data.
    async fn store(&self) -> Arc<dyn Store>;

    /// Another handle on the same data, as far apart from [`store`](Self::store) as the backend allows:
    /// its own connections, as another process would have. A clone if there is no such thing.
    async fn other(&self) -> Arc<dyn Store>;

    /// Lets this much time pass on the store's clock.
    async fn pass(&self, time: Duration);
}

/// A [`Harness`] whose store can also be looked into.
#[async_trait]
pub trait InspectHarness: Harness {
    /// A look into this harness's data.
    async fn inspect(&self) -> Arc<dyn Inspect>;
}

/// A fresh, empty store that can join its user's transactions, for one clause.
#[async_trait]
pub trait TransactHarness: Send + Sync + 'static {
    /// The store.
    type Store: Transactional + Clone;

    /// A handle on this harness's data.
    async fn store(&self) -> Self::Store;

    /// Another handle on the same data, as far apart from [`store`](Self::store) as the backend allows.
    async fn other(&self) -> Self::Store;

    /// Writes a line inside the transaction, as the store's user would, to a table of the user's own.
    async fn note(&self, transaction: &mut <Self::Store as Transactional>::Transaction, line: &str);

    /// The lines that are committed, in the order of their writing, read outside of any transaction.
    async fn notes(&self) -> Vec<String>;

    /// Lets this much time pass on the store's clock.
    async fn pass(&self, time: Duration);
}

/// Expands to one test for each clause on [`Store`](onlyonce_core::Store). The argument is an expression that makes a fresh
/// [`Harness`]; it is evaluated in each test.
#[macro_export]
macro_rules! suite {
    ($harness:expr) => {
        $crate::tests_of! { $harness;
            register:
                an_insert_writes_where_there_is_nothing
                an_insert_tells_what_is_there
                an_insert_tells_of_an_expired_record
                an_insert_follows_a_removal
                a_replace_writes_over_the_expected_revision
                a_replace_with_another_revision_loses
                a_replace_of_nothing_loses
                a_replace_writes_over_an_expired_record
                a_remove_takes_the_expected_revision
                a_remove_with_another_revision_takes_nothing
                a_remove_of_nothing_is_false
                a_read_of_nothing_is_none
                a_read_tells_of_an_expired_record
                a_used_revision_never_matches_again
                another_handle_sees_every_write
                ids_never_interfere;
            bytes:
                a_binary_body_survives
                an_empty_outcome_is_not_a_missing_one
                a_large_body_survives
                numbers_survive_at_their_limits
                the_far_future_survives
                fingerprints_survive
                any_text_may_stand_in_a_scope
                a_replace_changes_every_field;
            clock:
                a_grant_counts_from_the_write
                an_outcome_counts_from_the_write
                given_times_are_kept
                now_comes_with_what_is_seen
                time_passes
                time_never_goes_back;
            sweep:
                it_removes_what_is_expired
                it_spares_what_is_not
                it_removes_no_more_than_asked
                a_swept_key_is_free;
            races:
                one_insert_wins
                one_replace_wins
                one_remove_wins
                a_replace_or_a_remove_wins
                a_sweep_never_takes_a_renewed_record
                keys_do_not_wait_for_each_other
                a_dropped_call_is_whole;
            engine:
                one_claim_executes
                one_claim_takes_over
                a_replay_is_the_outcome_byte_for_byte
                a_release_frees_the_key
                an_attempt_to_be_made_again_counts
                a_grant_left_alone_stays_held
                a_taken_over_holder_loses_its_lease
                a_late_holder_finishes_if_nobody_took_over
                hold_refuses_a_lapsed_key
                a_renewal_counts_from_its_own_moment
                an_expired_key_starts_afresh
                a_mismatch_is_refused_in_every_state;
            faults:
                an_execution_survives_any_fault
                a_release_survives_any_fault
                a_take_over_survives_any_fault;
        }
    };
}

/// Expands to one test for each clause on [`Inspect`](onlyonce_core::Inspect). The argument is an expression that makes a
/// fresh [`InspectHarness`].
#[macro_export]
macro_rules! inspect_suite {
    ($harness:expr) => {
        $crate::tests_of! { $harness;
            inspect:
                an_empty_store_lists_nothing
                records_are_listed_whole
                any_text_is_listed_as_written
                the_oldest_comes_first
                what_changes_is_not_missed
                pages_visit_each_record_once
                no_more_rows_than_asked
                each_filter_selects
                filters_add_up
                a_filter_is_no_pattern;
        }
    };
}

/// Expands to one test for each clause on [`Transactional`](onlyonce_core::Transactional). The argument is an
/// expression that makes a fresh [`TransactHarness`].
#[macro_export]
macro_rules! transact_suite {
    ($harness:expr) => {
        $crate::tests_of! { $harness;
            transact:
                an_execution_is_kept_with_its_work
                a_rolled_back_execution_leaves_nothing
                a_dropped_transaction_leaves_nothing
                nobody_sees_an_open_claim
                a_copy_waits_and_replays
                a_copy_waits_and_executes_after_a_rollback
                a_copy_gives_up_after_its_wait
                of_many_copies_one_executes
                a_held_key_is_refused
                a_lapsed_key_is_taken_over_or_refused
                an_expired_key_starts_afresh
                a_rolled_back_take_over_leaves_the_record
                a_copy_of_a_take_over_waits
                a_mismatch_is_refused
                both_ways_in_see_each_others_outcomes
                an_outcome_survives_byte_for_byte
                times_count_from_the_writes
                an_insert_and_a_replace_compare
                a_transaction_without_a_claim_commits
                an_opened_transaction_commits_or_leaves_nothing
                a_grant_is_completed_beside_its_work
                a_stale_grant_completes_nothing
                a_dropped_begin_leaves_no_transaction
                a_dropped_claim_leaves_nothing;
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! tests_of {
    ($harness:expr; $($module:ident: $($clause:ident)+;)+) => {$(
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $clause() {
                    $crate::$module::$clause(&$harness).await;
                }
            )+
        }
    )+};
}
