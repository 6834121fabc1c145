//! Group commit: concurrent writes share one durable commit.
//!
//! While one batch commits, the next gathers; nothing waits for a batch to fill. Writers run on tasks of
//! their own, so a caller that is dropped never interrupts the database driver.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tracing::error;

use crate::identity::{Id, Operation};
use crate::record::{NewState, Revision, Write};
use crate::store::{Inserted, Replaced, StoreError, StoreErrorKind};

/// One call of a [`Store`](crate::Store), as data.
#[derive(Clone, Debug)]
pub enum Call {
    /// See [`Store::insert`](crate::Store::insert).
    Insert(Operation, Write),
    /// See [`Store::replace`](crate::Store::replace).
    Replace(Id, Revision, Write),
    /// See [`Store::remove`](crate::Store::remove).
    Remove(Id, Revision),
}

/// What a [`Call`] returned.
#[derive(Clone, Debug)]
pub enum Reply {
    /// Of an insert.
    Inserted(Inserted),
    /// Of a replace.
    Replaced(Replaced),
    /// Of a remove.
    Removed(bool),
}

/// The database side of a [`Group`].
pub trait Writer: Send + 'static {
    /// Applies the calls in order and commits them together; returns one result for each, in the
    /// same order. A call that fails by itself must not take the others with it.
    fn write(&mut self, calls: &[Call]) -> impl Future<Output = Vec<Result<Reply, StoreError>>> + Send;
}

/// Hands calls to [`Writer`]s in batches. Clones share the writers, which end with the last of them.
#[derive(Clone, Debug)]
pub struct Group {
    handle: Arc<Handle>,
}

/// What the clones of a [`Group`] share.
#[derive(Debug)]
struct Handle(Arc<Queue>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The calls that no writer has yet.
#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    /// Wakes a writer that has nothing to do.
    work: Notify,
    places: Arc<Semaphore>,
    calls_max: usize,
}

#[derive(Debug)]
struct State {
    waiting: Vec<Job>,
    /// The keys that are being written. Calls on them wait their turn, and so keep their order.
    ids_held: HashSet<Id>,
    open: bool,
}

#[derive(Debug)]
struct Job {
    call: Call,
    reply: oneshot::Sender<Answer>,
    /// Given back when the call is in a batch.
    _place: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
struct Answer {
    result: Result<Reply, StoreError>,
    orphan: Orphan,
}

/// A key that was claimed for a caller who may never learn of it. Dropped with the answer unread, it
/// releases the key, which would otherwise stay held by nobody until its lease ends.
#[derive(Debug)]
struct Orphan {
    release: Option<Call>,
    group: Weak<Handle>,
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let Some(call) = self.release.take() else { return };
        if let Some(handle) = self.group.upgrade() {
            let (reply, _) = oneshot::channel();
            handle.0.push(Job { call, reply, _place: None });
        }
    }
}

/// How many batches' worth of calls may wait in all.
const BATCHES_WAITING_MAX: usize = 32;

/// How many bytes of outcomes one batch has at most, unless a single one is larger. A message that is too
/// big for the database or the time that a call may take would fail for everyone in it.
const BATCH_BYTES_MAX: usize = 8 << 20;

impl Group {
    /// Starts the writer on a task of its own. A batch has at most `calls_max` calls, and 32 times as many
    /// may wait for the next.
    pub fn start(writer: impl Writer, calls_max: usize) -> Self {
        Self::start_many([writer], calls_max)
    }

    /// Starts several writers, so that one batch is sent while another commits. The calls on one key are
    /// in one batch at a time, and so keep their order.
    pub fn start_many<W: Writer>(writers: impl IntoIterator<Item = W>, calls_max: usize) -> Self {
        let handle = Arc::new(Handle(Arc::new(Queue {
            state: Mutex::new(State { waiting: Vec::new(), ids_held: HashSet::new(), open: true }),
            work: Notify::new(),
            places: Arc::new(Semaphore::new(calls_max * BATCHES_WAITING_MAX)),
            calls_max,
        })));
        for writer in writers {
            tokio::spawn(run(writer, Arc::clone(&handle.0), Arc::downgrade(&handle)));
        }
        Self { handle }
    }

    /// Applies one call, together with whatever else is waiting.
    ///
    /// # Errors
    /// As the writer says; [`StoreErrorKind::Ambiguous`] if it went away with the call in hand.
    pub async fn call(&self, call: Call) -> Result<Reply, StoreError> {
        let closed = || StoreError::new(StoreErrorKind::Unavailable, "the store is closed");
        let queue = &self.handle.0;
        let place = Arc::clone(&queue.places).acquire_owned().await.map_err(|_| closed())?;
        let (reply, answer) = oneshot::channel();
        if !queue.push(Job { call, reply, _place: Some(place) }) {
            return Err(closed());
        }
        let Answer { result, mut orphan } = answer.await.map_err(|_| {
            StoreError::new(StoreErrorKind::Ambiguous, "the store was closed during the call")
        })?;
        orphan.release = None;
        result
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `false` if no writer will take it.
    fn push(&self, job: Job) -> bool {
        {
            let mut state = self.state();
            if !state.open {
                return false;
            }
            state.waiting.push(job);
        }
        // The writer that wrote last has the connection that is least likely to be gone.
        self.work.notify_last();
        true
    }

    /// Ends the writers, once they have written what waits.
    fn close(&self) {
        self.places.close();
        self.state().open = false;
        self.work.notify_one();
    }

    /// The next batch; `None` if there will be none.
    async fn next(&self) -> Option<Vec<Job>> {
        loop {
            {
                let mut state = self.state();
                let State { waiting, ids_held, open } = &mut *state;
                let (batch, cut) = next_batch(waiting, ids_held, self.calls_max);
                ids_held.extend(batch.iter().map(|job| job.call.id()));
                let ended = !*open && waiting.is_empty();
                drop(state);
                if cut {
                    self.work.notify_one();
                }
                if !batch.is_empty() {
                    return Some(batch);
                }
                if ended {
                    return None;
                }
            }
            self.work.notified().await;
        }
    }

    fn let_go(&self, ids: &[Id]) {
        let mut state = self.state();
        for id in ids {
            state.ids_held.remove(id);
        }
    }
}

/// Closes the queue when a writer ends, and so ends the next one. One that ends early, by a panic or with its
/// runtime, will never let go of the keys that it holds: what waits is given up.
struct Lifeline<'a>(&'a Queue);

impl Drop for Lifeline<'_> {
    fn drop(&mut self) {
        self.0.close();
        let waiting = std::mem::take(&mut self.0.state().waiting);
        if !waiting.is_empty() {
            error!(calls = waiting.len(), "a writer ended early");
        }
    }
}

async fn run<W: Writer>(mut writer: W, queue: Arc<Queue>, group: Weak<Handle>) {
    let _lifeline = Lifeline(&queue);
    while let Some(batch) = queue.next().await {
        let ids: Vec<Id> = batch.iter().map(|job| job.call.id()).collect();
        write(&mut writer, batch, &group).await;
        queue.let_go(&ids);
    }
}

/// Takes what may be written now, in the order in which rows are locked; `true` if there is more of it.
fn next_batch(waiting: &mut Vec<Job>, ids_held: &HashSet<Id>, calls_max: usize) -> (Vec<Job>, bool) {
    // Nobody waits for these any more. A grant must not be given to a caller that has left; the other
    // calls finish work that is done.
    waiting.retain(|job| !(job.reply.is_closed() && job.call.write().is_some_and(Write::is_grant)));
    let mut batch: Vec<Job> = Vec::new();
    let (mut bytes, mut full) = (0, false);
    for job in std::mem::take(waiting) {
        if ids_held.contains(&job.call.id()) {
            waiting.push(job);
            continue;
        }
        let with_it = bytes + job.call.outcome_bytes();
        // Once one has to wait, all later ones do: some may be on its key.
        full |= batch.len() >= calls_max || (with_it > BATCH_BYTES_MAX && !batch.is_empty());
        if full {
            waiting.push(job);
        } else {
            bytes = with_it;
            batch.push(job);
        }
    }
    // Two writers that lock rows in different orders deadlock. Calls on one key keep their order.
    batch.sort_by_key(|job| job.call.id());
    (batch, full)
}

/// Writes one batch and answers its callers.
async fn write<W: Writer>(writer: &mut W, batch: Vec<Job>, group: &Weak<Handle>) {
    let (calls, replies): (Vec<_>, Vec<_>) = batch.into_iter().map(|job| (job.call, job.reply)).unzip();
    let results = writer.write(&calls).await;
    if results.len() != calls.len() {
        error!(calls = calls.len(), results = results.len(), "the writer lost count of its calls");
        return;
    }
    let mut orphans = Vec::new();
    for ((call, reply), result) in calls.into_iter().zip(replies).zip(results) {
        let applied =
            matches!(result, Ok(Reply::Inserted(Inserted::New(_)) | Reply::Replaced(Replaced::Written(_))));
        let release = match call.write() {
            Some(write) if applied && write.is_first_grant() => Some(Call::Remove(call.id(), write.revision)),
            _ => None,
        };
        let orphan = Orphan { release, group: Weak::clone(group) };
        if let Err(mut undelivered) = reply.send(Answer { result, orphan }) {
            orphans.extend(undelivered.orphan.release.take());
        }
    }
    // At once, because the queue may be closed by now.
    if !orphans.is_empty() {
        writer.write(&orphans).await;
    }
}

impl Call {
    /// The id that the call is about.
    #[must_use]
    pub fn id(&self) -> Id {
        match self {
            Self::Insert(operation, _) => operation.id(),
            Self::Replace(id, ..) | Self::Remove(id, _) => *id,
        }
    }

    fn outcome_bytes(&self) -> usize {
        match self.write().map(|write| &write.state) {
            Some(NewState::Done(outcome)) => outcome.head.len() + outcome.body.len(),
            _ => 0,
        }
    }

    fn write(&self) -> Option<&Write> {
        match self {
            Self::Insert(_, write) | Self::Replace(_, _, write) => Some(write),
            Self::Remove(..) => None,
        }
    }
}

/// The conversions that a store's methods need; a reply of the wrong kind is a writer's bug.
impl Reply {
    /// The reply to an insert.
    ///
    /// # Errors
    /// If it is the reply to another kind of call.
    pub fn inserted(self) -> Result<Inserted, StoreError> {
        match self {
            Self::Inserted(inserted) => Ok(inserted),
            other => Err(other.mixed_up()),
        }
    }

    /// The reply to a replace.
    ///
    /// # Errors
    /// If it is the reply to another kind of call.
    pub fn replaced(self) -> Result<Replaced, StoreError> {
        match self {
            Self::Replaced(replaced) => Ok(replaced),
            other => Err(other.mixed_up()),
        }
    }

    /// The reply to a remove.
    ///
    /// # Errors
    /// If it is the reply to another kind of call.
    pub fn removed(self) -> Result<bool, StoreError> {
        match self {
            Self::Removed(removed) => Ok(removed),
            other => Err(other.mixed_up()),
        }
    }

    fn mixed_up(&self) -> StoreError {
        StoreError::new(StoreErrorKind::Ambiguous, format!("the store mixed up its replies: {self:?}"))
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Waker};
    use std::time::Duration;

    use bytes::Bytes;
    use tokio::sync::Semaphore;
    use tokio::task::JoinHandle;
    use tokio::time::sleep;

    use super::*;
    use crate::machine::{self, Lapse, Policy};
    use crate::record::{Fingerprint, Outcome, Timestamp};
    use crate::{Key, MemoryStore, Store};

    /// Writes to memory; each batch waits for a permit, as for a commit.
    #[derive(Clone)]
    struct Slow {
        store: MemoryStore,
        commits: Arc<Semaphore>,
        batches: Arc<Mutex<Vec<Vec<Call>>>>,
    }

    impl Slow {
        fn new() -> Self {
            Self { store: MemoryStore::new(), commits: Arc::new(Semaphore::new(0)), batches: Arc::default() }
        }

        /// Lets everything that can happen without a commit happen.
        async fn settle(&self) {
            sleep(Duration::from_millis(1)).await;
        }

        async fn commit(&self, batches: usize) {
            self.commits.add_permits(batches);
            self.settle().await;
        }

        fn batch_sizes(&self) -> Vec<usize> {
            self.batches.lock().expect("no panic while locked").iter().map(Vec::len).collect()
        }

        async fn holds(&self, key: &str) -> bool {
            self.store.read(operation(key).id()).await.expect("memory answers").is_some()
        }
    }

    impl Writer for Slow {
        async fn write(&mut self, calls: &[Call]) -> Vec<Result<Reply, StoreError>> {
            self.batches.lock().expect("no panic while locked").push(calls.to_vec());
            self.commits.acquire().await.expect("never closed").forget();
            let mut results = Vec::new();
            for call in calls.iter().cloned() {
                results.push(match call {
                    Call::Insert(operation, write) => {
                        self.store.insert(&operation, write).await.map(Reply::Inserted)
                    }
                    Call::Replace(id, expected, write) => {
                        self.store.replace(id, expected, write).await.map(Reply::Replaced)
                    }
                    Call::Remove(id, expected) => self.store.remove(id, expected).await.map(Reply::Removed),
                });
            }
            results
        }
    }

    fn operation(key: &str) -> Operation {
        Operation::new("default", "POST /payments", "ann", Key::new(key).expect("a good key"))
    }

    fn done_write(revision: u128) -> Write {
        let outcome = Outcome { status: 201, head: Bytes::new(), body: Bytes::new() };
        Write { state: NewState::Done(outcome), granted_at: Some(Timestamp(0)), ..write(revision) }
    }

    fn write(revision: u128) -> Write {
        let policy = Policy {
            lease: Duration::from_secs(75),
            retention: Duration::from_secs(86_400),
            on_lapse: Lapse::Rerun,
        };
        machine::grant(Fingerprint { target: [0; 32], body: [0; 32] }, Revision(revision), &policy)
    }

    fn insert(key: &str, revision: u128) -> Call {
        Call::Insert(operation(key), write(revision))
    }

    type Caller = JoinHandle<Result<Reply, StoreError>>;

    fn spawn(group: &Group, call: Call) -> Caller {
        let group = group.clone();
        tokio::spawn(async move { group.call(call).await })
    }

    async fn leave(caller: Caller) {
        caller.abort();
        assert!(caller.await.expect_err("aborted").is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn calls_gather_while_a_commit_is_under_way() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        let first = spawn(&group, insert("first", 1));
        slow.settle().await;
        assert_eq!(slow.batch_sizes(), [1], "nothing waits for a batch to fill");
        let rest: Vec<_> = (0..10).map(|i| spawn(&group, insert(&format!("key-{i}"), i))).collect();
        slow.settle().await;
        assert_eq!(slow.batch_sizes(), [1]);
        slow.commit(4).await;
        assert_eq!(slow.batch_sizes(), [1, 4, 4, 2]);
        for caller in [first].into_iter().chain(rest) {
            let reply = caller.await.expect("no panic").expect("written");
            assert!(matches!(reply, Reply::Inserted(Inserted::New(_))));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_on_one_key_keep_their_order_and_keys_are_sorted() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 100);
        let mut callers = vec![spawn(&group, insert("first", 1))];
        slow.settle().await;
        let id = |key| operation(key).id();
        for key in ["a", "b", "c", "d"] {
            for call in [
                insert(key, 1),
                Call::Replace(id(key), Revision(1), write(2)),
                Call::Remove(id(key), Revision(2)),
                insert(key, 3),
            ] {
                callers.push(spawn(&group, call));
                slow.settle().await;
            }
        }
        slow.commit(2).await;
        for caller in callers {
            let reply = caller.await.expect("no panic").expect("written");
            let applied = matches!(
                reply,
                Reply::Inserted(Inserted::New(_))
                    | Reply::Replaced(Replaced::Written(_))
                    | Reply::Removed(true)
            );
            assert!(applied, "{reply:?}: every call finds what the one before it left");
        }
        let batches = slow.batches.lock().expect("no panic while locked").clone();
        assert_eq!(batches[1].len(), 16);
        assert!(batches[1].is_sorted_by_key(Call::id), "two writers lock rows in one order");
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_is_in_one_batch_at_a_time_while_others_go_on() {
        let slow = Slow::new();
        let group = Group::start_many([slow.clone(), slow.clone(), slow.clone()], 100);
        let mut callers = vec![spawn(&group, insert("a", 1))];
        slow.settle().await;
        let replace = |from, to| Call::Replace(operation("a").id(), Revision(from), write(to));
        for call in [replace(1, 2), insert("b", 1), replace(2, 3), insert("c", 1)] {
            callers.push(spawn(&group, call));
            slow.settle().await;
        }
        assert_eq!(slow.batch_sizes(), [1, 1, 1], "b and c do not wait for the batch of a");
        slow.commit(3).await;
        assert_eq!(slow.batch_sizes(), [1, 1, 1, 2], "what waited for a comes together");
        slow.commit(1).await;
        for caller in callers {
            let reply = caller.await.expect("no panic").expect("written");
            let applied =
                matches!(reply, Reply::Inserted(Inserted::New(_)) | Reply::Replaced(Replaced::Written(_)));
            assert!(applied, "{reply:?}: every call finds what the one before it left");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_writer_takes_what_another_lets_go() {
        let slow = Slow::new();
        let group = Group::start_many([slow.clone(), slow.clone()], 2);
        let mut callers: Vec<_> = ["a", "b"].map(|key| spawn(&group, insert(key, 1))).into();
        slow.settle().await;
        callers.extend(["a", "a", "b"].map(|key| spawn(&group, insert(key, 2))));
        slow.settle().await;
        assert_eq!(slow.batch_sizes(), [2], "both keys are being written");
        slow.commit(1).await;
        assert_eq!(slow.batch_sizes(), [2, 2, 1], "b does not wait for the second batch of a");
        slow.commit(2).await;
        for caller in callers {
            assert!(caller.await.expect("no panic").is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_writer_ends_with_the_group() {
        struct Ending {
            slow: Slow,
            _alive: Arc<()>,
        }
        impl Writer for Ending {
            async fn write(&mut self, calls: &[Call]) -> Vec<Result<Reply, StoreError>> {
                self.slow.write(calls).await
            }
        }
        let (slow, alive) = (Slow::new(), Arc::new(()));
        let writers = [(); 5].map(|()| Ending { slow: slow.clone(), _alive: Arc::clone(&alive) });
        let group = Group::start_many(writers, 4);
        let busy = spawn(&group, insert("busy", 1));
        slow.settle().await;
        drop(group);
        slow.settle().await;
        assert!(Arc::strong_count(&alive) > 1, "one has a batch in hand");
        slow.commit(1).await;
        assert!(busy.await.expect("no panic").is_ok());
        slow.settle().await;
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_a_key_is_written_though_the_group_is_closed() {
        let slow = Slow::new();
        let group = Group::start_many([slow.clone(), slow.clone()], 100);
        let first = spawn(&group, insert("a", 1));
        slow.settle().await;
        let second = spawn(&group, Call::Remove(operation("a").id(), Revision(1)));
        slow.settle().await;
        drop(group);
        slow.commit(2).await;
        assert!(first.await.expect("no panic").is_ok());
        assert!(matches!(second.await.expect("no panic"), Ok(Reply::Removed(true))));
    }

    #[tokio::test(start_paused = true)]
    async fn an_insert_abandoned_before_its_batch_is_not_applied() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        let kept = spawn(&group, insert("kept", 1));
        slow.settle().await;
        let abandoned = spawn(&group, insert("abandoned", 1));
        slow.settle().await;
        leave(abandoned).await;
        slow.commit(2).await;
        assert!(kept.await.expect("no panic").is_ok());
        assert!(!slow.holds("abandoned").await);
        assert_eq!(slow.batch_sizes(), [1], "nothing is left to write");
    }

    #[tokio::test(start_paused = true)]
    async fn an_insert_abandoned_in_its_commit_is_removed() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        let abandoned = spawn(&group, insert("abandoned", 1));
        slow.settle().await;
        leave(abandoned).await;
        slow.commit(1).await;
        assert!(slow.holds("abandoned").await, "the commit was under way");
        slow.commit(1).await;
        assert!(!slow.holds("abandoned").await);
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_copy_does_not_remove_the_holders_key() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        let holder = spawn(&group, insert("key", 1));
        slow.commit(1).await;
        assert!(holder.await.expect("no panic").is_ok());
        let copy = spawn(&group, insert("key", 2));
        slow.settle().await;
        leave(copy).await;
        slow.commit(2).await;
        assert!(slow.holds("key").await);
        assert_eq!(slow.batch_sizes(), [1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_work_is_written_though_its_caller_left() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        for key in ["done", "released"] {
            let holder = spawn(&group, insert(key, 1));
            slow.commit(1).await;
            assert!(holder.await.expect("no panic").is_ok());
        }
        let busy = spawn(&group, insert("busy", 1));
        slow.settle().await;
        let done = spawn(&group, Call::Replace(operation("done").id(), Revision(1), done_write(2)));
        let released = spawn(&group, Call::Remove(operation("released").id(), Revision(1)));
        slow.settle().await;
        leave(done).await;
        leave(released).await;
        slow.commit(2).await;
        assert!(busy.await.expect("no panic").is_ok());
        let seen = slow.store.read(operation("done").id()).await.expect("memory answers");
        assert_eq!(seen.expect("stored").record.revision, Revision(2));
        assert!(!slow.holds("released").await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_of_large_outcomes_is_cut_by_bytes() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 16);
        let busy = spawn(&group, insert("busy", 1));
        slow.settle().await;
        let large = |key: &str| {
            let outcome =
                Outcome { status: 200, head: Bytes::new(), body: vec![0; BATCH_BYTES_MAX / 2].into() };
            let write = Write { state: NewState::Done(outcome), ..done_write(2) };
            Call::Replace(operation(key).id(), Revision(1), write)
        };
        let calls: Vec<_> = ["a", "b", "c", "d", "e"].map(|key| spawn(&group, large(key))).into();
        slow.settle().await;
        slow.commit(4).await;
        assert!(busy.await.expect("no panic").is_ok());
        for call in calls {
            assert!(call.await.expect("no panic").is_ok());
        }
        assert_eq!(slow.batch_sizes(), [1, 2, 2, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_many_wait_for_keeps_no_other_waiting() {
        let slow = Slow::new();
        let group = Group::start_many([slow.clone(), slow.clone()], 4);
        let first = spawn(&group, insert("hot", 1));
        slow.settle().await;
        let copies: Vec<_> = (2..20).map(|revision| spawn(&group, insert("hot", revision))).collect();
        slow.settle().await;
        let other = spawn(&group, insert("other", 1));
        slow.settle().await;
        assert_eq!(slow.batch_sizes(), [1, 1], "the other key is being written");
        slow.commit(20).await;
        assert!(first.await.expect("no panic").is_ok() && other.await.expect("no panic").is_ok());
        for copy in copies {
            assert!(copy.await.expect("no panic").is_ok());
        }
    }

    /// Takes the key over from revision 1; as the first attempt, or a later one.
    fn take_over(key: &str, first: bool) -> Call {
        let created_at = if first { None } else { Some(Timestamp(0)) };
        Call::Replace(operation(key).id(), Revision(1), Write { attempt: 2, created_at, ..write(2) })
    }

    #[tokio::test(start_paused = true)]
    async fn a_take_over_whose_caller_left_in_the_queue_is_not_made() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        for first in [true, false] {
            let key = format!("{first}");
            let holder = spawn(&group, insert(&key, 1));
            slow.commit(1).await;
            assert!(holder.await.expect("no panic").is_ok());
            let busy = spawn(&group, insert(&format!("busy {first}"), 1));
            slow.settle().await;
            let taker = spawn(&group, take_over(&key, first));
            slow.settle().await;
            leave(taker).await;
            slow.commit(1).await;
            assert!(busy.await.expect("no panic").is_ok());
            let seen = slow.store.read(operation(&key).id()).await.expect("memory answers");
            assert_eq!(seen.expect("stored").record.revision, Revision(1), "first: {first}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_take_over_without_its_caller_is_taken_back_and_a_later_one_stays() {
        let slow = Slow::new();
        let group = Group::start(slow.clone(), 4);
        for (key, first) in [("first", true), ("later", false)] {
            let holder = spawn(&group, insert(key, 1));
            slow.commit(1).await;
            assert!(holder.await.expect("no panic").is_ok());
            let taker = spawn(&group, take_over(key, first));
            slow.settle().await;
            leave(taker).await;
            slow.commit(2).await;
            assert_eq!(slow.holds(key).await, !first, "{key}: the attempt before it may have done the work");
        }
    }

    /// Drops a caller after each number of polls, with the group at each stage in between.
    #[tokio::test(start_paused = true)]
    async fn a_caller_dropped_at_any_await_leaves_no_key_behind() {
        let mut finished = 0;
        for polls in 0..=4 {
            for queue_full in [false, true] {
                let slow = Slow::new();
                let group = Group::start(slow.clone(), 1);
                // One commit is under way and, if asked, as many calls wait as the queue takes.
                let mut others = vec![spawn(&group, insert("other-0", 1))];
                slow.settle().await;
                if queue_full {
                    let waiting = 1..=BATCHES_WAITING_MAX;
                    others.extend(waiting.map(|at| spawn(&group, insert(&format!("other-{at}"), 1))));
                    slow.settle().await;
                }
                let answered = {
                    let mut call = pin!(group.call(insert("dropped", 1)));
                    let mut answered = false;
                    for _ in 0..polls {
                        let mut context = Context::from_waker(Waker::noop());
                        if call.as_mut().poll(&mut context).is_ready() {
                            answered = true;
                            break;
                        }
                        slow.commit(1).await;
                    }
                    answered
                };
                slow.commit(2 * BATCHES_WAITING_MAX).await;
                for other in others {
                    assert!(other.await.expect("no panic").is_ok(), "the others are served");
                }
                assert_eq!(slow.holds("dropped").await, answered, "{polls} polls, full: {queue_full}");
                finished += usize::from(answered);
            }
        }
        assert!(finished > 0, "the last polls see the answer");
    }

    type Results = Vec<Result<Reply, StoreError>>;

    /// Answers as told, one batch after the other.
    struct Failing(Vec<fn(usize) -> Results>);

    impl Writer for Failing {
        async fn write(&mut self, calls: &[Call]) -> Results {
            sleep(Duration::from_millis(10)).await;
            self.0.remove(0)(calls.len())
        }
    }

    /// The kinds of failure that three calls in one batch, after a first one alone, see.
    async fn failures(writer: Failing) -> (Group, Vec<StoreErrorKind>) {
        let group = Group::start(writer, 8);
        let first = spawn(&group, insert("first", 1));
        sleep(Duration::from_millis(1)).await;
        let callers: Vec<_> = (0..3).map(|i| spawn(&group, insert(&format!("key-{i}"), 1))).collect();
        first.await.expect("no panic").expect("written");
        let mut kinds = Vec::new();
        for caller in callers {
            kinds.push(caller.await.expect("no panic").expect_err("failed").kind());
        }
        (group, kinds)
    }

    fn fine(calls: usize) -> Results {
        (0..calls).map(|_| Ok(Reply::Removed(false))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_commit_reaches_every_caller() {
        let failed = |calls| {
            (0..calls)
                .map(|_| Err(StoreError::new(StoreErrorKind::Ambiguous, "the connection was cut")))
                .collect()
        };
        let (group, kinds) = failures(Failing(vec![fine, failed, fine])).await;
        assert_eq!(kinds, [StoreErrorKind::Ambiguous; 3]);
        group.call(insert("later", 1)).await.expect("the writer goes on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_fails_by_itself_does_not_take_the_others_with_it() {
        let one_failed = |calls: usize| {
            let mut results = fine(calls - 1);
            results.push(Err(StoreError::new(StoreErrorKind::Unreadable, "a damaged row")));
            results
        };
        let group = Group::start(Failing(vec![fine, one_failed]), 8);
        let first = spawn(&group, insert("first", 1));
        sleep(Duration::from_millis(1)).await;
        let callers: Vec<_> = (0..3).map(|i| spawn(&group, insert(&format!("key-{i}"), 1))).collect();
        first.await.expect("no panic").expect("written");
        let mut failed = 0;
        for caller in callers {
            failed += usize::from(caller.await.expect("no panic").is_err());
        }
        assert_eq!(failed, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_that_loses_count_leaves_its_callers_in_doubt_and_goes_on() {
        let (group, kinds) = failures(Failing(vec![fine, |calls| fine(calls - 1), fine])).await;
        assert_eq!(kinds, [StoreErrorKind::Ambiguous; 3]);
        group.call(insert("later", 1)).await.expect("the writer goes on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_that_panics_leaves_its_callers_in_doubt_and_later_ones_refused() {
        let (group, kinds) = failures(Failing(vec![fine, |_| panic!("a bug in a driver")])).await;
        assert_eq!(kinds, [StoreErrorKind::Ambiguous; 3]);
        let later = group.call(insert("later", 1)).await.expect_err("closed");
        assert_eq!(later.kind(), StoreErrorKind::Unavailable);
    }

    #[test]
    fn a_reply_of_the_wrong_kind_is_in_doubt() {
        let removed = || Reply::Removed(true);
        assert!(removed().inserted().expect_err("mixed up").may_have_applied());
        assert!(removed().replaced().expect_err("mixed up").may_have_applied());
        assert!(removed().removed().expect("as asked"));
        let lost = Reply::Replaced(Replaced::Lost(None));
        assert!(lost.removed().expect_err("mixed up").may_have_applied());
    }
}
