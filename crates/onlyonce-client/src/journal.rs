//! What a caller wants to happen, on disk before it is sent: a crash between sending and learning the answer
//! is then no second charge.
//!
//! ```text
//!            begin                    an answer that lasts
//!  (none) ──────────▶ unfinished ─────────────────────────▶ answered ──▶ purged, after keep_answers
//!     ▲                │   │ ▲
//!     │   certain that │   └─┘ attempts end without one; resume
//!     └── nothing was  │
//!         done         └──▶ unknown: older than the server's memory; a person forgets it
//! ```
//!
//! Two processes with the same intent at once both send, with the same key: the server does the work once.
//! The answer that is recorded first is the answer of both. There is no lock that a crash could leave behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use std::{fmt, fs};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, StatusCode};
use onlyonce_core::outcome::Response;
use onlyonce_core::{Key, Outcome, Recorded};
use reqwest::{Request, Url};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteRow, SqliteSynchronous};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row as _, SqliteConnection};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::answer::{Answer, Receipt, is_replay};
use crate::decide::Work;
use crate::error::Error;
use crate::send::{Frozen, Started};

/// The journal's mark in a SQLite file: "OOcj".
const APPLICATION_ID: i64 = 0x4f4f_636a;
const SCHEMA_VERSION: i64 = 1;

const SCHEMA: &str = "\
    CREATE TABLE intents (
        id           INTEGER PRIMARY KEY AUTOINCREMENT,
        intent       TEXT NOT NULL UNIQUE,
        key          TEXT NOT NULL,
        method       TEXT NOT NULL,
        url          TEXT NOT NULL,
        withheld     TEXT NOT NULL,
        created_at   INTEGER NOT NULL,
        senders      INTEGER NOT NULL DEFAULT 1,
        attempts     INTEGER NOT NULL DEFAULT 0,
        last_error   TEXT,
        answered_at  INTEGER,
        status       INTEGER,
        bytes        INTEGER NOT NULL,
        request_head BLOB,
        request_body BLOB,
        answer_head  BLOB,
        answer_body  BLOB,
        CHECK ((answered_at IS NULL) = (status IS NULL)),
        CHECK ((answered_at IS NULL) = (answer_head IS NULL)),
        CHECK ((answered_at IS NULL) = (request_head IS NOT NULL))
    ) STRICT;
    CREATE INDEX intents_answered_at ON intents (answered_at, bytes);";

/// How long to wait for another process's write lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// How far in the future a time may lie because a clock was set, before nothing is known about it.
const CLOCK_STEP_MAX: Duration = Duration::from_secs(300);

/// How much a journal holds, and for how long. All durations are on the local clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JournalOptions {
    /// At most so many intents. Unfinished ones are never removed to make room.
    pub intents_max: u64,
    /// At most so many bytes of requests and answers when an intent is begun; its answer comes on top.
    pub bytes_max: u64,
    /// For how long an answer is kept. The same intent later is sent again.
    pub keep_answers: Duration,
    /// Header lines that are not written down, such as `Authorization`. They are wanted again from whoever
    /// resumes. The key is always written down.
    pub keep_out: Vec<HeaderName>,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self {
            intents_max: 100_000,
            bytes_max: 1 << 30,
            keep_answers: Duration::from_secs(30 * 86_400),
            keep_out: Vec::new(),
        }
    }
}

/// Intents, their keys, requests and answers in one SQLite file. Clones share a connection; several
/// processes may share the file.
///
/// The file is created for its owner alone: it holds requests with their credentials. They are erased when
/// the answer is recorded.
#[derive(Clone)]
pub struct Journal {
    connection: Arc<Mutex<SqliteConnection>>,
    options: Arc<JournalOptions>,
    path: Arc<PathBuf>,
}

/// One intent, for people who look.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The intent.
    pub intent: String,
    /// Its key.
    pub key: String,
    /// The request's method.
    pub method: String,
    /// The request's URL.
    pub url: String,
    /// When it was written down.
    pub created_at: SystemTime,
    /// How many attempts are known of; a crash hides some.
    pub attempts: u64,
    /// Why it is unfinished, as far as is known.
    pub last_error: Option<String>,
    /// When its answer was recorded, and the answer's status.
    pub answered: Option<(SystemTime, u16)>,
    /// The size of request and answer.
    pub bytes: u64,
}

/// Why the journal cannot be used. Unless it says otherwise, nothing was sent.
#[derive(Debug)]
#[non_exhaustive]
pub enum JournalError {
    /// The file must be another one.
    Refused(String),
    /// It holds as much as it may.
    Full {
        /// How many intents are in it.
        intents: u64,
        /// The bytes of their requests and answers.
        bytes: u64,
    },
    /// What stands there cannot be read.
    Damaged(String),
    /// SQLite failed.
    Failed(sqlx::Error),
}

pub(crate) enum Begun {
    /// This call wrote it down.
    Fresh(i64),
    /// It was there, without an answer.
    Open(Row),
    /// As it ended.
    Answered(Result<Answer, Error>),
}

/// An intent without an answer.
pub(crate) struct Row {
    pub(crate) id: i64,
    pub(crate) intent: String,
    pub(crate) key: Key,
    method: Method,
    url: Url,
    withheld: Vec<HeaderName>,
    headers: HeaderMap,
    body: Option<Bytes>,
    created_at: i64,
}

impl Journal {
    /// Opens the file, creates it if need be, and purges it.
    ///
    /// # Errors
    /// [`JournalError::Refused`] if the file is something else, a newer version's, or its folder is absent.
    pub async fn open(path: impl AsRef<Path>, options: JournalOptions) -> Result<Self, JournalError> {
        let path = path.as_ref().to_path_buf();
        create_private(&path)?;
        look(&path).await?;
        let mut connection = connect(&path).await?;
        prepare(&path, &mut connection).await?;
        let connection = Arc::new(Mutex::new(connection));
        let journal = Self { connection, options: Arc::new(options), path: Arc::new(path) };
        journal.purge().await?;
        Ok(journal)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every intent, the oldest first.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn entries(&self) -> Result<Vec<Entry>, JournalError> {
        let rows = self.detached(|mut connection| async move {
            sqlx::query(
                "SELECT intent, key, method, url, created_at, attempts, last_error, answered_at, status, bytes \
                 FROM intents ORDER BY id",
            )
            .fetch_all(&mut *connection)
            .await
        });
        rows.await?.iter().map(|row| entry(row).map_err(JournalError::Failed)).collect()
    }

    /// Removes an intent, answered or not; `false` if there is none. The same intent later is a new operation
    /// for the journal, although with the same key unless it had one of its own.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn forget(&self, intent: &str) -> Result<bool, JournalError> {
        let intent = intent.to_owned();
        let removed = self.detached(|mut connection| async move {
            sqlx::query("DELETE FROM intents WHERE intent = ?").bind(intent).execute(&mut *connection).await
        });
        Ok(removed.await?.rows_affected() > 0)
    }

    /// Removes answers older than `keep_answers`, and says how many. Unfinished intents stay, however old.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn purge(&self) -> Result<u64, JournalError> {
        let before = now_ms().saturating_sub(millis(self.options.keep_answers));
        let removed = self.detached(move |mut connection| async move {
            sqlx::query("DELETE FROM intents WHERE answered_at < ?")
                .bind(before)
                .execute(&mut *connection)
                .await
        });
        Ok(removed.await?.rows_affected())
    }

    /// Writes the intent down unless it stands there, and says how it stands.
    ///
    /// Race: several callers begin it at once. The unique intent lets one insert; all go on from the row.
    pub(crate) async fn begin(
        &self,
        intent: &str,
        frozen: &Frozen,
        own_key: bool,
        key_header: &HeaderName,
    ) -> Result<Begun, Error> {
        let mut found = self.find(intent).await?;
        if found.is_none() {
            if let Some(id) = self.insert(intent, frozen, key_header).await? {
                return Ok(Begun::Fresh(id));
            }
            found = self.find(intent).await?;
        }
        // Nobody inserted it, so there was no room. Old answers may be in the way.
        if found.is_none() {
            self.purge().await?;
            if let Some(id) = self.insert(intent, frozen, key_header).await? {
                return Ok(Begun::Fresh(id));
            }
            found = self.find(intent).await?;
        }
        let Some(row) = found else { return Err(self.full().await.into()) };
        let differs = differences(&row, frozen, own_key).map_err(JournalError::Failed)?;
        if !differs.is_empty() {
            return Err(Error::IntentReused { intent: intent.to_owned(), differs });
        }
        Ok(begun(&row)?)
    }

    /// The ids and names of unfinished intents, the oldest first.
    pub(crate) async fn unfinished(&self) -> Result<Vec<(i64, String)>, JournalError> {
        self.detached(|mut connection| async move {
            sqlx::query_as("SELECT id, intent FROM intents WHERE answered_at IS NULL ORDER BY id")
                .fetch_all(&mut *connection)
                .await
        })
        .await
    }

    /// The intent if it is still unfinished.
    pub(crate) async fn open_row(&self, id: i64) -> Result<Option<Row>, JournalError> {
        match self.row(id).await?.as_ref().map(begun).transpose()? {
            Some(Begun::Open(row)) => Ok(Some(row)),
            _ => Ok(None),
        }
    }

    /// Records how the attempts of an intent ended. If its answer was recorded before by somebody else, that
    /// is the answer. `idle` says that these attempts have certainly done nothing.
    ///
    /// An answer that cannot be recorded is the caller's all the same: the work was done. The intent stays
    /// unfinished, and will be given its answer again by the server.
    pub(crate) async fn note(
        &self,
        id: i64,
        result: Result<Answer, Error>,
        idle: bool,
    ) -> Result<Answer, Error> {
        let noted = match &result {
            Ok(answer) if answer.lasts() => self.record(id, answer).await,
            // It was done, and there will never be another answer.
            Err(Error::Refused(refused)) if refused.work == Work::Done => {
                self.record(id, &refused.answer).await
            }
            Ok(answer) => {
                let reason = format!("answered with {}, which says nothing lasting", answer.status);
                self.describe(id, answer.receipt.attempts, reason, idle).await
            }
            Err(error) => self.describe(id, attempts(error), error.to_string(), idle).await,
        };
        match noted {
            Ok(true) => result,
            Ok(false) => match self.row(id).await {
                Ok(Some(row)) => match begun(&row) {
                    Ok(Begun::Answered(recorded)) => recorded,
                    _ => result,
                },
                _ => result,
            },
            Err(error) => {
                tracing::error!(%error, "the journal could not be told how an intent ended; it stays unfinished");
                result
            }
        }
    }

    /// Another sender goes on with an unfinished intent. Says whether one before it may have done the work;
    /// `None` if it is not unfinished any more.
    pub(crate) async fn join(&self, id: i64) -> Result<Option<bool>, JournalError> {
        let joined = self.detached(move |mut connection| async move {
            sqlx::query_scalar(
                "UPDATE intents SET senders = senders + 1 WHERE id = ? AND answered_at IS NULL RETURNING senders > 1",
            )
            .bind(id)
            .fetch_optional(&mut *connection)
            .await
        });
        joined.await
    }

    /// Removes an intent of which nothing happened.
    ///
    /// Race: another sender has found it. Whether something happened is then not this one's to say.
    pub(crate) async fn withdraw(&self, id: i64) {
        let removed = self.detached(move |mut connection| async move {
            sqlx::query("DELETE FROM intents WHERE id = ? AND senders = 1 AND answered_at IS NULL")
                .bind(id)
                .execute(&mut *connection)
                .await
        });
        if let Err(error) = removed.await {
            tracing::error!(%error, "an intent of which nothing happened stays in the journal as unfinished");
        }
    }

    async fn find(&self, intent: &str) -> Result<Option<SqliteRow>, JournalError> {
        let intent = intent.to_owned();
        self.detached(|mut connection| async move {
            sqlx::query("SELECT * FROM intents WHERE intent = ?")
                .bind(intent)
                .fetch_optional(&mut *connection)
                .await
        })
        .await
    }

    async fn row(&self, id: i64) -> Result<Option<SqliteRow>, JournalError> {
        self.detached(move |mut connection| async move {
            sqlx::query("SELECT * FROM intents WHERE id = ?").bind(id).fetch_optional(&mut *connection).await
        })
        .await
    }

    /// `None` if somebody else was first or there is no room.
    ///
    /// Race: many callers find the last room free. Insert and count are one statement, under SQLite's write lock.
    async fn insert(
        &self,
        intent: &str,
        frozen: &Frozen,
        key_header: &HeaderName,
    ) -> Result<Option<i64>, Error> {
        let Frozen { request, key: Some(key), .. } = frozen else {
            return Err(Error::request("an intent is sent with a key"));
        };
        let (kept, withheld) = self.keep_out(request.headers(), key_header);
        let head = encode_lines(kept);
        let body = request.body().and_then(|body| body.as_bytes()).map(<[u8]>::to_vec);
        let bytes = (head.len() + body.as_ref().map_or(0, Vec::len) + request.url().as_str().len()) as i64;
        let (intent, key) = (intent.to_owned(), key.as_str().to_owned());
        let (method, url) = (request.method().to_string(), request.url().to_string());
        let (intents_max, bytes_max) =
            (saturating(self.options.intents_max), saturating(self.options.bytes_max));
        let inserted = self.detached(move |mut connection| async move {
            sqlx::query_scalar(
                "INSERT INTO intents (intent, key, method, url, withheld, created_at, bytes, request_head, request_body) \
                 SELECT ?, ?, ?, ?, ?, ?, ?, ?, ? \
                 WHERE (SELECT count(*) FROM intents) < ? \
                   AND (SELECT coalesce(sum(bytes), 0) FROM intents) <= ? - ? \
                 ON CONFLICT DO NOTHING RETURNING id",
            )
            .bind(intent)
            .bind(key)
            .bind(method)
            .bind(url)
            .bind(withheld)
            .bind(now_ms())
            .bind(bytes)
            .bind(head.to_vec())
            .bind(body)
            .bind(intents_max)
            .bind(bytes_max)
            .bind(bytes)
            .fetch_optional(&mut *connection)
            .await
        });
        Ok(inserted.await?)
    }

    /// The key is not kept out: it has to be the same ever after.
    fn keep_out(&self, headers: &HeaderMap, key_header: &HeaderName) -> (HeaderMap, String) {
        let mut kept = headers.clone();
        let withheld: Vec<_> = self
            .options
            .keep_out
            .iter()
            .filter(|name| *name != key_header && kept.remove(*name).is_some())
            .map(HeaderName::as_str)
            .collect();
        (kept, withheld.join(","))
    }

    async fn full(&self) -> JournalError {
        let counted = self.detached(|mut connection| async move {
            sqlx::query_as::<_, (i64, i64)>("SELECT count(*), coalesce(sum(bytes), 0) FROM intents")
                .fetch_one(&mut *connection)
                .await
        });
        match counted.await {
            Ok((intents, bytes)) => {
                JournalError::Full { intents: intents.unsigned_abs(), bytes: bytes.unsigned_abs() }
            }
            Err(error) => error,
        }
    }

    /// `false` if the intent has an answer already, or is gone.
    async fn record(&self, id: i64, answer: &Answer) -> Result<bool, JournalError> {
        let Answer { status, headers, body, receipt, .. } = answer;
        let response =
            Response { status: *status, headers: headers.clone(), body: body.clone(), ..Response::default() };
        let Outcome { status, head, body } = Recorded::Response(response).encode();
        let attempts = i64::from(receipt.attempts);
        let recorded = self.detached(move |mut connection| async move {
            sqlx::query(
                "UPDATE intents SET answered_at = ?, status = ?, answer_head = ?, answer_body = ?, \
                 attempts = attempts + ?, last_error = NULL, request_head = NULL, bytes = bytes + ? \
                 WHERE id = ? AND answered_at IS NULL",
            )
            .bind(now_ms())
            .bind(i64::from(status))
            .bind(head.to_vec())
            .bind(body.to_vec())
            .bind(attempts)
            .bind((head.len() + body.len()) as i64)
            .bind(id)
            .execute(&mut *connection)
            .await
        });
        Ok(recorded.await?.rows_affected() > 0)
    }

    /// A sender that has certainly done nothing leaves no doubt behind.
    async fn describe(
        &self,
        id: i64,
        attempts: u32,
        reason: String,
        idle: bool,
    ) -> Result<bool, JournalError> {
        let described = self.detached(move |mut connection| async move {
            sqlx::query(
                "UPDATE intents SET attempts = attempts + ?, last_error = ?, senders = senders - ? \
                 WHERE id = ? AND answered_at IS NULL",
            )
            .bind(i64::from(attempts))
            .bind(reason)
            .bind(i64::from(idle))
            .bind(id)
            .execute(&mut *connection)
            .await
        });
        Ok(described.await?.rows_affected() > 0)
    }

    /// Runs on a task of its own, so that a caller who leaves interrupts no statement.
    async fn detached<T, F>(
        &self,
        work: impl FnOnce(OwnedMutexGuard<SqliteConnection>) -> F + Send + 'static,
    ) -> Result<T, JournalError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, sqlx::Error>> + Send,
    {
        let connection = Arc::clone(&self.connection);
        let task = tokio::spawn(async move { work(connection.lock_owned().await).await });
        task.await.unwrap_or_else(|_| Err(sqlx::Error::WorkerCrashed)).map_err(JournalError::Failed)
    }
}

impl Row {
    /// How old the intent is, if the server may have forgotten it before the last attempt.
    pub(crate) fn forgotten(&self, now_ms: i64, retention: Duration, deadline: Duration) -> Option<Duration> {
        let age = now_ms.saturating_sub(self.created_at);
        // A clock that was set back hides how long it has been.
        let odd = age < -millis(CLOCK_STEP_MAX);
        let age = Duration::from_millis(age.max(0).unsigned_abs());
        (odd || age.saturating_add(deadline) > retention).then_some(age)
    }

    /// The request as it was, with the header lines that were kept out.
    pub(crate) fn frozen(self, withheld: &HeaderMap, started: Started) -> Result<Frozen, Error> {
        let mut request = Request::new(self.method, self.url);
        *request.headers_mut() = self.headers;
        for name in &self.withheld {
            if !withheld.contains_key(name) {
                let intent = &self.intent;
                return Err(Error::request(format!(
                    "the intent {intent:?} was written down without its header {name}; give it again"
                )));
            }
            for value in withheld.get_all(name) {
                request.headers_mut().append(name, value.clone());
            }
        }
        *request.body_mut() = self.body.map(Into::into);
        let started = Started { on_the_wall: time(self.created_at), ..started };
        Ok(Frozen { request, key: Some(self.key), started })
    }
}

/// In what the request differs from the one that was written down. Header lines may differ: what they say
/// about a moment or a client is no part of the intent.
fn differences(row: &SqliteRow, frozen: &Frozen, own_key: bool) -> Result<Vec<&'static str>, sqlx::Error> {
    let Frozen { request, key, .. } = frozen;
    let body = request.body().and_then(|body| body.as_bytes()).unwrap_or_default();
    let kept = row.try_get::<Option<&[u8]>, _>("request_body")?.unwrap_or_default();
    let key = key.as_ref().map_or("", Key::as_str);
    let same = [
        ("key", !own_key || row.try_get::<&str, _>("key")? == key),
        ("method", row.try_get::<&str, _>("method")? == request.method().as_str()),
        ("url", row.try_get::<&str, _>("url")? == request.url().as_str()),
        ("body", kept == body),
    ];
    Ok(same.into_iter().filter(|(_, same)| !same).map(|(part, _)| part).collect())
}

fn begun(row: &SqliteRow) -> Result<Begun, JournalError> {
    let intent: String = row.try_get("intent").map_err(JournalError::Failed)?;
    let damaged = |what: &str| JournalError::Damaged(format!("the intent {intent:?} is damaged: {what}"));
    let key: String = row.try_get("key").map_err(JournalError::Failed)?;
    let key = Key::new(key).map_err(|_| damaged("its key"))?;
    let url: Url = row
        .try_get::<&str, _>("url")
        .map_err(JournalError::Failed)?
        .parse()
        .map_err(|_| damaged("its URL"))?;
    if row.try_get::<Option<i64>, _>("answered_at").map_err(JournalError::Failed)?.is_some() {
        let (response, attempts) = recorded(row).map_err(JournalError::Failed)?;
        let response = response.ok_or_else(|| damaged("its answer"))?;
        let replayed = is_replay(&response.headers);
        let receipt = Receipt { key: Some(key), attempts, replayed, recorded: true };
        return Ok(Begun::Answered(Answer::recorded(response, url, receipt).told()));
    }
    let method: &str = row.try_get("method").map_err(JournalError::Failed)?;
    let head: &[u8] = row.try_get("request_head").map_err(JournalError::Failed)?;
    let withheld: &str = row.try_get("withheld").map_err(JournalError::Failed)?;
    Ok(Begun::Open(Row {
        id: row.try_get("id").map_err(JournalError::Failed)?,
        key,
        method: method.parse().map_err(|_| damaged("its method"))?,
        url,
        withheld: withheld
            .split(',')
            .filter(|name| !name.is_empty())
            .map(|name| name.parse().map_err(|_| damaged("its header lines")))
            .collect::<Result<_, _>>()?,
        headers: decode_lines(head).ok_or_else(|| damaged("its header lines"))?,
        body: row
            .try_get::<Option<Vec<u8>>, _>("request_body")
            .map_err(JournalError::Failed)?
            .map(Bytes::from),
        created_at: row.try_get("created_at").map_err(JournalError::Failed)?,
        intent,
    }))
}

/// The answer of an answered intent, `None` if it is damaged, and how many attempts it took.
fn recorded(row: &SqliteRow) -> Result<(Option<Response>, u32), sqlx::Error> {
    let outcome = Outcome {
        status: u16::try_from(row.try_get::<i64, _>("status")?).unwrap_or_default(),
        head: row.try_get::<Vec<u8>, _>("answer_head")?.into(),
        body: row.try_get::<Vec<u8>, _>("answer_body")?.into(),
    };
    let response = match Recorded::decode(&outcome) {
        Ok(Recorded::Response(response)) => Some(response),
        _ => None,
    };
    Ok((response, u32::try_from(row.try_get::<i64, _>("attempts")?).unwrap_or(u32::MAX)))
}

/// Header lines in the format of a recorded answer's.
fn encode_lines(headers: HeaderMap) -> Bytes {
    Recorded::Response(Response { headers, ..Response::default() }).encode().head
}

fn decode_lines(head: &[u8]) -> Option<HeaderMap> {
    let outcome =
        Outcome { status: StatusCode::OK.as_u16(), head: Bytes::copy_from_slice(head), body: Bytes::new() };
    match Recorded::decode(&outcome) {
        Ok(Recorded::Response(response)) => Some(response.headers),
        _ => None,
    }
}

fn entry(row: &SqliteRow) -> Result<Entry, sqlx::Error> {
    let answered_at: Option<i64> = row.try_get("answered_at")?;
    let status: Option<i64> = row.try_get("status")?;
    Ok(Entry {
        intent: row.try_get("intent")?,
        key: row.try_get("key")?,
        method: row.try_get("method")?,
        url: row.try_get("url")?,
        created_at: time(row.try_get("created_at")?),
        attempts: row.try_get::<i64, _>("attempts")?.unsigned_abs(),
        last_error: row.try_get("last_error")?,
        answered: answered_at
            .zip(status)
            .map(|(at, status)| (time(at), u16::try_from(status).unwrap_or_default())),
        bytes: row.try_get::<i64, _>("bytes")?.unsigned_abs(),
    })
}

fn attempts(error: &Error) -> u32 {
    match error {
        Error::Refused(refused) => refused.attempts,
        Error::GaveUp(gave_up) => gave_up.attempts,
        _ => 0,
    }
}

/// Refuses another's database before anything is written to it. What else fails is the writer's to report.
async fn look(path: &Path) -> Result<(), JournalError> {
    let options = SqliteConnectOptions::new().filename(path).read_only(true).busy_timeout(BUSY_TIMEOUT);
    let Ok(mut connection) = options.disable_statement_logging().connect().await else { return Ok(()) };
    let looked = is_ready(path, &mut connection).await;
    let _ = connection.close().await;
    match looked {
        Err(error @ JournalError::Refused(_)) => Err(error),
        _ => Ok(()),
    }
}

/// Race: several processes open a new file at once, and only one may switch it to its log; the busy timeout
/// does not cover that.
async fn connect(path: &Path) -> Result<SqliteConnection, JournalError> {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(BUSY_TIMEOUT)
        // What was deleted were credentials and answers.
        .pragma("secure_delete", "on");
    let deadline = tokio::time::Instant::now() + BUSY_TIMEOUT;
    loop {
        match options.clone().disable_statement_logging().connect().await {
            Err(error) if is_busy(&error) && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            connected => return connected.map_err(|error| explain(path, error)),
        }
    }
}

/// Creates the file, if it is absent, for its owner alone, as it makes one that is empty. SQLite gives the log
/// beside it the same mode.
fn create_private(path: &Path) -> Result<(), JournalError> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Ok(file) => {
            // Closing a file drops the locks of this process on it, those of a connection that found it
            // already among them. So it stays open.
            std::mem::forget(file);
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => make_private(path),
        Err(error) => {
            Err(JournalError::Refused(format!("the journal {} cannot be created: {error}", path.display())))
        }
    }
}

#[cfg(not(unix))]
fn make_private(_: &Path) -> Result<(), JournalError> {
    Ok(())
}

#[cfg(unix)]
fn make_private(path: &Path) -> Result<(), JournalError> {
    let empty = fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == 0);
    if !empty {
        return Ok(());
    }
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(path, private).map_err(|error| {
        JournalError::Refused(format!("the journal {} is not this user's: {error}", path.display()))
    })
}

async fn prepare(path: &Path, connection: &mut SqliteConnection) -> Result<(), JournalError> {
    if is_ready(path, connection).await? {
        return Ok(());
    }
    // Race: several processes create the table at once. The first to begin does.
    let mut transaction =
        connection.begin_with("BEGIN IMMEDIATE").await.map_err(|error| explain(path, error))?;
    if !is_ready(path, &mut transaction).await? {
        let seal =
            format!("PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};");
        for statements in [SCHEMA.to_owned(), seal] {
            sqlx::raw_sql(AssertSqlSafe(statements))
                .execute(&mut *transaction)
                .await
                .map_err(|error| explain(path, error))?;
        }
    }
    transaction.commit().await.map_err(|error| explain(path, error))
}

/// `false` if there is nothing in the file.
async fn is_ready(path: &Path, connection: &mut SqliteConnection) -> Result<bool, JournalError> {
    let (application, version, tables): (i64, i64, i64) = sqlx::query_as(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema) \
         FROM pragma_application_id, pragma_user_version",
    )
    .fetch_one(connection)
    .await
    .map_err(|error| explain(path, error))?;
    let refused = |why: &str| Err(JournalError::Refused(format!("{} {why}", path.display())));
    match (application, version) {
        (APPLICATION_ID, SCHEMA_VERSION) => Ok(true),
        (APPLICATION_ID, _) => refused("was written by a newer version; use that one"),
        (0, 0) if tables == 0 => Ok(false),
        _ => refused("is another application's database; give the path of a new file"),
    }
}

/// SQLite's primary result codes.
fn code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error()?.code()?.parse::<i32>().ok().map(|code| code & 0xff)
}

fn is_busy(error: &sqlx::Error) -> bool {
    code(error) == Some(5)
}

fn explain(path: &Path, error: sqlx::Error) -> JournalError {
    match code(&error) {
        Some(26) => JournalError::Refused(format!(
            "{} is not a SQLite file; give the path of a new one",
            path.display()
        )),
        _ => JournalError::Failed(error),
    }
}

pub(crate) fn now_ms() -> i64 {
    match SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => millis(since),
        Err(before) => -millis(before.duration()),
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn saturating(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn time(ms: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(ms.max(0).unsigned_abs())
}

impl From<JournalError> for Error {
    fn from(error: JournalError) -> Self {
        Self::Journal(error)
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("path", &self.path).finish_non_exhaustive()
    }
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(why) | Self::Damaged(why) => f.write_str(why),
            Self::Full { intents, bytes } => write!(
                f,
                "the journal is full with {intents} intents and {bytes} bytes; resume or forget unfinished intents, \
                 keep answers for a shorter time, or give it more room"
            ),
            Self::Failed(error) => write!(f, "the journal failed: {error}"),
        }
    }
}

impl std::error::Error for JournalError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed(error) => Some(error),
            _ => None,
        }
    }
}
