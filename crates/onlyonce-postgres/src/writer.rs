//! The writing connections: many calls, one statement, one commit.

use std::collections::HashMap;
use std::sync::Arc;

use onlyonce_core::group::{Call, Reply, Writer};
use onlyonce_core::record::Seen;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Id, StoreError, StoreErrorKind, Timestamp};
use sqlx::postgres::{PgArguments, PgRow};
use tokio::sync::{Mutex, oneshot};
use tokio::time::Instant;

use crate::link::{Failure, Link, Statement};
use crate::reader;
use crate::sql::{self, Change, Claim};

/// How often an insert is tried whose key is taken and freed by others each time.
const ROUNDS_MAX: u32 = 16;

/// Writes batches of calls over one connection.
pub(crate) struct Batches {
    /// Shared with [`close`](crate::PostgresStore::close), which comes when the last batch is done.
    pub(crate) link: Arc<Mutex<Link>>,
    /// Dropped with the writer, when its last call is answered.
    pub(crate) _ended: oneshot::Sender<()>,
}

type Answer = Result<Reply, StoreError>;

impl Writer for Batches {
    async fn write(&mut self, calls: &[Call]) -> Vec<Answer> {
        let link = Arc::clone(&self.link);
        let mut link = link.lock().await;
        let mut batch = Batch { answers: calls.iter().map(|_| None).collect(), calls };
        batch.run(&mut link).await;
        let unanswered = || Err(StoreError::new(StoreErrorKind::Ambiguous, "the batch lost a call"));
        batch.answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
    }
}

struct Batch<'a> {
    calls: &'a [Call],
    answers: Vec<Option<Answer>>,
}

impl Batch<'_> {
    /// One statement after the other until every call is answered; each has an id once.
    async fn run(&mut self, link: &mut Link) {
        let mut rounds_in_vain = 0;
        loop {
            let wave = self.next_wave();
            if wave.is_empty() {
                return;
            }
            let failed = self.write(link, &wave).await;
            if let Err(failure) = failed {
                // Those that were not sent any more.
                let error = StoreError::new(StoreErrorKind::Unavailable, failure.error.to_string());
                return self.fail_rest(&error);
            }
            if wave.iter().all(|at| self.answers[*at].is_none()) {
                rounds_in_vain += 1;
                if rounds_in_vain == ROUNDS_MAX {
                    let reason = "too many writers compete for the key";
                    return self.fail_rest(&StoreError::new(StoreErrorKind::Unavailable, reason));
                }
            }
            self.answer_foregone();
        }
    }

    /// The first unanswered call of each id. The calls are sorted by id.
    fn next_wave(&self) -> Vec<usize> {
        let mut wave: Vec<usize> = Vec::new();
        for at in (0..self.calls.len()).filter(|at| self.answers[*at].is_none()) {
            if wave.last().is_none_or(|last| self.calls[*last].id() != self.calls[at].id()) {
                wave.push(at);
            }
        }
        wave
    }

    /// Answers what an earlier call of the same key makes certain. All calls of a batch are concurrent, so
    /// what one of them found or left may be what the next one finds.
    fn answer_foregone(&mut self) {
        let mut known: Option<Option<Seen>> = None;
        for (at, call) in self.calls.iter().enumerate() {
            if at > 0 && self.calls[at - 1].id() != call.id() {
                known = None;
            }
            match (&self.answers[at], &known) {
                (Some(Ok(reply)), _) => known = left_by(call, reply),
                (Some(Err(_)), _) => known = None,
                (None, Some(stored)) => match foregone(stored.as_ref(), call) {
                    Some(reply) => self.answers[at] = Some(Ok(reply)),
                    None => known = None,
                },
                (None, None) => {}
            }
        }
    }

    fn fail_rest(&mut self, error: &StoreError) {
        for answer in self.answers.iter_mut().filter(|answer| answer.is_none()) {
            *answer = Some(Err(copy(error)));
        }
    }

    fn fail(&mut self, wave: &[usize], error: &StoreError) {
        for at in wave {
            self.answers[*at].get_or_insert_with(|| Err(copy(error)));
        }
    }

    /// Sends one wave: what writes rows in one statement, what removes them in another. Fails if the rest
    /// of the batch would fail as well.
    async fn write(&mut self, link: &mut Link, wave: &[usize]) -> Result<(), Failure> {
        let (removals, writes): (Vec<usize>, Vec<usize>) =
            wave.iter().partition(|at| matches!(self.calls[**at], Call::Remove(..)));
        for part in [writes, removals] {
            if part.is_empty() {
                continue;
            }
            match self.send(link, &part).await {
                Ok(()) => {}
                Err(failure) if failure.everywhere || part.len() == 1 => {
                    self.fail(&part, &failure.error);
                    if failure.everywhere {
                        return Err(failure);
                    }
                }
                // One of them is the culprit: alone it takes nobody with it. Those that are answered were
                // applied, and must not meet their own rows.
                Err(_) => {
                    let rest: Vec<usize> =
                        part.into_iter().filter(|at| self.answers[*at].is_none()).collect();
                    self.send_each(link, &rest).await?;
                }
            }
        }
        Ok(())
    }

    async fn send_each(&mut self, link: &mut Link, part: &[usize]) -> Result<(), Failure> {
        let deadline = Instant::now() + link.target.call_timeout;
        for at in part {
            if Instant::now() >= deadline {
                let reason = "Postgres took too long over other calls of the batch";
                self.fail(&[*at], &StoreError::new(StoreErrorKind::Unavailable, reason));
            } else if let Err(failure) = self.send(link, &[*at]).await {
                self.fail(&[*at], &failure.error);
                if failure.everywhere {
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    /// Sends one statement for these calls, all of which write or all of which remove.
    async fn send(&mut self, link: &mut Link, part: &[usize]) -> Result<(), Failure> {
        if let [Call::Remove(..), ..] = part.first().map_or(&[][..], |at| &self.calls[*at..=*at]) {
            return self.remove(link, part).await;
        }
        let (mut claims, mut changes) = (Vec::new(), Vec::new());
        for at in part {
            match &self.calls[*at] {
                Call::Insert(operation, write) => claims.push(Claim::of(operation, write)),
                Call::Replace(id, expected, write) => changes.push(Change::of(*id, *expected, write)),
                Call::Remove(..) => {}
            }
        }
        let rows = match (&claims[..], &changes[..]) {
            ([], [change]) => {
                let replaced = replace(link, change).await?;
                if let Some(now) = replaced {
                    self.answers[part[0]] = Some(Ok(Reply::Replaced(Replaced::Written(now))));
                }
                Vec::new()
            }
            ([claim], []) => {
                let text = Arc::clone(&link.target.sql.insert);
                fetch(link, &text, "claim the key", &|to| claim.bind(to)).await?
            }
            _ => {
                let text = Arc::clone(&link.target.sql.write_many);
                fetch(link, &text, "write", &|to| sql::bind_many(&claims, &changes, to)).await?
            }
        };
        self.take(part, &rows);
        let lost: Vec<usize> = part
            .iter()
            .copied()
            .filter(|at| self.answers[*at].is_none() && matches!(self.calls[*at], Call::Replace(..)))
            .collect();
        if lost.is_empty() { Ok(()) } else { self.tell_lost(link, &lost).await }
    }

    /// Answers the calls that the rows are about.
    fn take(&mut self, part: &[usize], rows: &[PgRow]) {
        let by_id: HashMap<Id, usize> = part.iter().map(|at| (self.calls[*at].id(), *at)).collect();
        for row in rows {
            let Ok(Some(at)) = sql::id(row).map(|id| by_id.get(&id).copied()) else { continue };
            let answer = match (&self.calls[at], sql::written(row)) {
                (Call::Insert(..), Ok((true, now))) => Ok(Reply::Inserted(Inserted::New(now))),
                (_, Ok((true, now))) => Ok(Reply::Replaced(Replaced::Written(now))),
                (call, Ok((false, _))) => match sql::seen(row) {
                    Ok(seen) => Ok(Reply::Inserted(Inserted::Exists(seen))),
                    Err(reason) => Err(StoreError::unreadable(call.id(), &reason)),
                },
                (call, Err(reason)) => Err(StoreError::unreadable(call.id(), &reason)),
            };
            self.answers[at] = Some(answer);
        }
    }

    /// Those replaces changed no row: what is there instead?
    ///
    /// Read afterwards and not with the update, whose snapshot may be older than the write it lost to.
    async fn tell_lost(&mut self, link: &mut Link, lost: &[usize]) -> Result<(), Failure> {
        let ids: Vec<Id> = lost.iter().map(|at| self.calls[*at].id()).collect();
        let mut found = reader::select(link, &ids).await?;
        for at in lost {
            let id = self.calls[*at].id();
            self.answers[*at] = Some(match found.remove(&id) {
                None => Ok(Reply::Replaced(Replaced::Lost(None))),
                Some(Ok(seen)) => Ok(Reply::Replaced(Replaced::Lost(Some(seen)))),
                Some(Err(reason)) => Err(StoreError::unreadable(id, &reason)),
            });
        }
        Ok(())
    }

    async fn remove(&mut self, link: &mut Link, part: &[usize]) -> Result<(), Failure> {
        let removals: Vec<_> = part
            .iter()
            .filter_map(|at| match &self.calls[*at] {
                Call::Remove(id, expected) => Some((*id, *expected)),
                _ => None,
            })
            .collect();
        let rows = match removals[..] {
            [(id, expected)] => {
                let text = Arc::clone(&link.target.sql.remove);
                fetch(link, &text, "release the key", &|to| sql::bind_removal(id, expected, to)).await?
            }
            _ => {
                let text = Arc::clone(&link.target.sql.remove_many);
                fetch(link, &text, "release keys", &|to| sql::bind_removals(&removals, to)).await?
            }
        };
        let removed: Vec<Id> = rows.iter().filter_map(|row| sql::id(row).ok()).collect();
        for at in part {
            self.answers[*at] = Some(Ok(Reply::Removed(removed.contains(&self.calls[*at].id()))));
        }
        Ok(())
    }
}

/// What is stored after this call, if that is known.
fn left_by(call: &Call, reply: &Reply) -> Option<Option<Seen>> {
    match (call, reply) {
        (Call::Insert(_, write), Reply::Inserted(Inserted::New(now)))
        | (Call::Replace(_, _, write), Reply::Replaced(Replaced::Written(now))) => {
            Some(Some(Seen { record: write.clone().at(*now), now: *now }))
        }
        (_, Reply::Inserted(Inserted::Exists(seen))) => Some(Some(seen.clone())),
        (_, Reply::Replaced(Replaced::Lost(seen))) => Some(seen.clone()),
        (_, Reply::Removed(true)) => Some(None),
        _ => None,
    }
}

/// The reply to a call that would write nothing over what is stored.
fn foregone(stored: Option<&Seen>, call: &Call) -> Option<Reply> {
    match (call, stored) {
        (Call::Insert(..), Some(seen)) => Some(Reply::Inserted(Inserted::Exists(seen.clone()))),
        (Call::Insert(..), None) => None,
        (Call::Replace(_, expected, _) | Call::Remove(_, expected), Some(seen))
            if seen.record.revision == *expected =>
        {
            None
        }
        (Call::Replace(..), stored) => Some(Reply::Replaced(Replaced::Lost(stored.cloned()))),
        (Call::Remove(..), _) => Some(Reply::Removed(false)),
    }
}

async fn replace(link: &mut Link, change: &Change) -> Result<Option<Timestamp>, Failure> {
    let text = Arc::clone(&link.target.sql.replace);
    let rows = fetch(link, &text, "replace the record", &|to| change.bind(to)).await?;
    let now = rows.first().map(|row| sql::get(row, 0).map(Timestamp));
    now.transpose()
        .map_err(|reason| Failure { error: StoreError::unreadable(change.id, &reason), everywhere: false })
}

async fn fetch(
    link: &mut Link,
    text: &Arc<str>,
    doing: &'static str,
    bind: &(dyn Fn(&mut PgArguments) -> Result<(), sqlx::error::BoxDynError> + Send + Sync),
) -> Result<Vec<PgRow>, Failure> {
    let arguments = || {
        let mut arguments = PgArguments::default();
        bind(&mut arguments).map(|()| arguments)
    };
    link.fetch(&Statement { text, arguments: &arguments, doing, writes: true }).await
}

fn copy(error: &StoreError) -> StoreError {
    StoreError::new(error.kind(), error.to_string())
}
