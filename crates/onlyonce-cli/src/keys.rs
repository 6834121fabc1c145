//! `onlyonce keys`: what a store remembers, and an operator's decisions about it.
//!
//! All of it works while proxies run. A decision names the revision that the operator saw, so it never
//! overwrites what a proxy wrote in between: it then fails, and the operator looks again.

mod view;

use std::io::{Read, Write};
use std::time::Duration;

use bytes::Bytes;
use clap::{Args, Subcommand, ValueEnum};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use onlyonce::{SWEEP_ROWS_MAX, inbox};
use onlyonce_core::machine::{self, Finish};
use onlyonce_core::outcome::Response;
use onlyonce_core::record::{Record, State as Stored};
use onlyonce_core::store::{Cursor, Entry, Filter, Page, Replaced};
use onlyonce_core::{Id, Key, Lapse, Policy, Recorded, Revision, StoreError, Timestamp, Verdict};

use crate::cli::{Failure, StoreArgs, duration};
use crate::config;
use crate::store::OpenStore;

pub(crate) use view::printable;

/// How many records are read at a time: each comes with its whole outcome.
const PAGE_ROWS: u32 = 64;

/// How many keys a table has unless it is told otherwise.
const TABLE_ROWS_DEFAULT: u64 = 100;

/// What can be done with keys.
#[derive(Subcommand, Clone, Debug)]
pub enum KeysCommand {
    /// List keys, those that are forgotten first in front
    #[command(after_help = "\
Examples:
  onlyonce keys list
  onlyonce keys list --state lapsed
  onlyonce keys list --endpoint 'POST /payments' --limit 0
  onlyonce keys list --json | jq 'group_by(.state)'

States: running (someone is doing the work), lapsed (its holder went silent), done (its outcome is recorded).
Exit code 1 if a record is damaged; the others are listed.")]
    List(ListArgs),
    /// Show everything known about a key, for every caller and endpoint that used it
    #[command(after_help = "\
Examples:
  onlyonce keys show order-4711
  onlyonce keys show order-4711 --caller ann --json

Exit code 1 if there is no such key.")]
    Show(KeyArgs),
    /// Forget a key: the next request with it runs the work
    #[command(after_help = "\
Examples:
  onlyonce keys release order-4711
  onlyonce keys release order-4711 --endpoint 'POST /payments' --caller ann

Release a key only if the work did not happen, or may happen again. Exit code 1 if there is no such key, 2
if several match or its work may be running (then --force).")]
    Release(ReleaseArgs),
    /// Record an outcome for a key: every retry is given it
    #[command(after_help = "\
Examples:
  onlyonce keys complete order-4711 --status 201 --body '{\"id\": 7}' --header 'content-type: application/json'
  onlyonce keys complete order-4711 --status 200 --body @answer.json

For work that is known to have happened although its answer was lost. Exit code 1 if there is no such key, 2
if several match, its work may be running, or it has an outcome already (then --force).")]
    Complete(CompleteArgs),
    /// Remove expired keys now; the proxy does it by itself every minute
    #[command(after_help = "\
Examples:
  onlyonce keys purge --store sqlite:/var/lib/onlyonce/keys.db

Keys that have not expired stay. One that has may stay for as long as its lease was; it counts as never seen
all the same.")]
    Purge(PurgeArgs),
}

impl KeysCommand {
    pub(crate) fn store_args(&mut self) -> &mut StoreArgs {
        match self {
            Self::List(args) => &mut args.store,
            Self::Show(args) => &mut args.store,
            Self::Release(args) => &mut args.key.store,
            Self::Complete(args) => &mut args.key.store,
            Self::Purge(args) => &mut args.store,
        }
    }
}

/// Which keys are meant.
#[derive(Args, Clone, Debug, Default)]
pub struct FilterArgs {
    /// Only the key with this id: 64 hexadecimal digits, as `keys show` prints them
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<Id>,
    /// Only in this namespace
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Only at this endpoint, such as 'POST /payments'
    #[arg(long, value_name = "ENDPOINT")]
    pub(crate) endpoint: Option<String>,
    /// Only from this caller; '' is the anonymous one
    #[arg(long, value_name = "CALLER")]
    pub(crate) caller: Option<String>,
    /// Only keys of this kind.
    #[arg(skip)]
    pub(crate) kind: Kind,
}

/// Which keys a command is about, and how it speaks of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All there are.
    #[default]
    Keys,
    /// Those of inboxes.
    Messages,
}

impl Kind {
    fn has(self, entry: &Entry) -> bool {
        self == Self::Keys || entry.operation.endpoint().starts_with(inbox::ENDPOINT_PREFIX)
    }

    fn noun(self) -> &'static str {
        match self {
            Self::Keys => "key",
            Self::Messages => "message",
        }
    }

    fn filters(self) -> &'static str {
        match self {
            Self::Keys => "--id, --namespace, --endpoint or --caller",
            Self::Messages => "--id, --namespace or --consumer",
        }
    }

    fn released(self) -> &'static str {
        match self {
            Self::Keys => "the next request with this key runs the work",
            Self::Messages => "the message is processed when it is delivered again",
        }
    }
}

impl FilterArgs {
    fn filter(&self, key: Option<&str>) -> Filter {
        Filter {
            id: self.id,
            namespace: self.namespace.clone(),
            endpoint: self.endpoint.clone(),
            caller: self.caller.clone(),
            key: key.map(str::to_owned),
        }
    }
}

/// What `keys list` is told.
#[derive(Args, Clone, Debug, Default)]
pub struct ListArgs {
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Only keys in this state
    #[arg(long, value_enum)]
    pub(crate) state: Option<StateArg>,
    /// At most so many; 0 is all of them [default: 100, and all with --json]
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// Print a JSON array, for programs
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

/// Which key is meant.
#[derive(Args, Clone, Debug, Default)]
pub struct KeyArgs {
    /// The client's Idempotency-Key, with or without its quotes
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Print JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

/// What `keys release` is told.
#[derive(Args, Clone, Debug, Default)]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
    /// Release it although its work may be running: it can then happen twice
    #[arg(long)]
    pub(crate) force: bool,
}

/// What `keys complete` is told.
#[derive(Args, Clone, Debug)]
pub struct CompleteArgs {
    #[command(flatten)]
    key: KeyArgs,
    /// The status that retries get
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(200..600))]
    status: u16,
    /// The body that retries get; @FILE takes a file's bytes, @- standard input [default: empty]
    #[arg(long, value_name = "TEXT or @FILE")]
    body: Option<String>,
    /// A header line that retries get, such as 'content-type: application/json'; may be repeated. What the
    /// proxy never records is refused, and Set-Cookie unless the --config file's [defaults] record cookies
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// How long the outcome is remembered [default: as long as the key's route said when it was claimed]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    retention: Option<Duration>,
    /// Complete it although its work may be running or it has an outcome already
    #[arg(long)]
    force: bool,
}

/// What `keys purge` is told.
#[derive(Args, Clone, Debug, Default)]
pub struct PurgeArgs {
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// A state to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StateArg {
    /// Someone is doing the work
    Running,
    /// Its holder went silent
    Lapsed,
    /// Its outcome is recorded
    Done,
}

/// Where a key stands, as people see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    Lapsed,
    Done,
    /// It counts as never seen; only its row is still there.
    Expired,
}

impl State {
    /// The same boundaries as [`machine::claim`]: at its end a lease is over, and at its end a key is
    /// forgotten.
    pub(crate) fn of(record: &Record, now: Timestamp) -> Self {
        match record.state {
            _ if record.expires_at <= now => Self::Expired,
            Stored::Running { lease_until } if now < lease_until => Self::Running,
            Stored::Running { .. } => Self::Lapsed,
            Stored::Done { .. } => Self::Done,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Lapsed => "lapsed",
            Self::Done => "done",
            Self::Expired => "expired",
        }
    }

    fn is(self, asked: StateArg) -> bool {
        matches!(
            (self, asked),
            (Self::Running, StateArg::Running)
                | (Self::Lapsed, StateArg::Lapsed)
                | (Self::Done, StateArg::Done)
        )
    }
}

/// Carries out one command.
///
/// # Errors
/// With the exit code that the command documents. Nothing was written then, unless it says so.
pub async fn run(mut command: KeysCommand, out: &mut impl Write) -> Result<(), Failure> {
    let (url, file) = config::load_store(command.store_args())?;
    let allow_volatile = command.store_args().allow_volatile || file.allow_volatile();
    let store = OpenStore::open_existing(&url, allow_volatile).await?;
    let done = match command {
        KeysCommand::List(args) => list(&args, &store, out).await,
        KeysCommand::Show(args) => show(&args, &store, out).await,
        KeysCommand::Release(args) => release(&args, &store, out).await,
        KeysCommand::Complete(args) => complete(&args, &store, file.record_cookies(), out).await,
        KeysCommand::Purge(args) => purge(&args, &store, out).await,
    };
    // What was asked for is done or not; that the log was not tidied up changes nothing about it.
    let _ = store.close().await;
    done
}

async fn list(args: &ListArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let limit = match args.limit {
        Some(0) => u64::MAX,
        Some(limit) => limit,
        None if args.json => u64::MAX,
        None => TABLE_ROWS_DEFAULT,
    };
    let mut pages = Pages::new(store, args.filter.filter(None));
    let mut listing = view::Listing::new(args.json);
    let mut left = limit;
    let mut unreadable = Vec::new();
    while let Some(page) = pages.next().await? {
        unreadable.extend(page.unreadable);
        let wanted = |entry: &Entry| {
            let state = State::of(&entry.record, entry.now);
            args.filter.kind.has(entry)
                && state != State::Expired
                && args.state.is_none_or(|asked| state.is(asked))
        };
        let mut entries: Vec<Entry> = page.entries.into_iter().filter(wanted).collect();
        let more = u64::try_from(entries.len()).unwrap_or(u64::MAX) > left;
        entries.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        left -= entries.len() as u64;
        listing.page(&entries, out)?;
        if more {
            eprintln!("onlyonce: there are more than {limit}; --limit N shows more, --limit 0 all");
            break;
        }
    }
    listing.end(out)?;
    if unreadable.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(format!("the list is not complete:\n  {}", unreadable.join("\n  "))))
}

async fn show(args: &KeyArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let entries = find(args, store).await?;
    if args.json {
        view::json(&entries, out)?;
    } else {
        view::details(&entries, out)?;
    }
    Ok(())
}

async fn release(args: &ReleaseArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let entry = find_one(&args.key, store).await?;
    if State::of(&entry.record, entry.now) == State::Running && !args.force {
        return Err(still_running(&entry, "release"));
    }
    if !store.store().remove(entry.operation.id(), entry.record.revision).await? {
        return Err(changed_meanwhile());
    }
    if args.key.json {
        view::json(&[entry], out)?;
    } else {
        writeln!(out, "released: {}", args.key.filter.kind.released())?;
    }
    Ok(())
}

async fn complete(
    args: &CompleteArgs,
    store: &OpenStore,
    record_cookies: bool,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let headers = recordable(&args.header, record_cookies)?;
    let entry = find_one(&args.key, store).await?;
    match State::of(&entry.record, entry.now) {
        State::Running if !args.force => return Err(still_running(&entry, "complete")),
        State::Done if !args.force => {
            return Err(Failure::usage(
                "the key has an outcome already, which retries are given; --force replaces it",
            ));
        }
        _ => {}
    }
    let retention = args.retention.unwrap_or_else(|| asked_retention(&entry.record));
    if retention.is_zero() || retention > onlyonce::settings::DURATION_MAX {
        return Err(Failure::usage("--retention must be longer than zero and at most ten years (3660d)"));
    }
    let outcome = Recorded::Response(Response {
        status: StatusCode::from_u16(args.status)
            .map_err(|_| Failure::usage("--status must be from 200 to 599"))?,
        headers,
        body: body(args.body.as_deref())?,
        trailers: HeaderMap::new(),
    })
    .encode();
    // Only `retention` counts for a record that is done.
    let policy = Policy { lease: Duration::ZERO, retention, on_lapse: Lapse::default() };
    let verdict = Verdict::Keep(outcome);
    let Finish::Complete(write) = machine::finish(&entry.record, verdict, Revision::fresh(), &policy) else {
        return Err(Failure::failed("an outcome to keep was not kept"));
    };
    let written = store.store().replace(entry.operation.id(), entry.record.revision, write.clone()).await?;
    let Replaced::Written(at) = written else { return Err(changed_meanwhile()) };
    if args.key.json {
        let record = write.at(at);
        view::json(&[Entry { record, now: at, ..entry }], out)?;
    } else {
        writeln!(out, "completed: every retry with this key is given status {}", args.status)?;
    }
    Ok(())
}

async fn purge(args: &PurgeArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let handle = store.store();
    let mut removed = 0;
    loop {
        let rows = handle.sweep(SWEEP_ROWS_MAX).await?;
        removed += rows;
        if rows < u64::from(SWEEP_ROWS_MAX) {
            break;
        }
    }
    if args.json {
        writeln!(out, "{}", serde_json::json!({ "removed": removed }))?;
    } else {
        writeln!(out, "removed {removed} expired {}", if removed == 1 { "key" } else { "keys" })?;
    }
    Ok(())
}

/// All that match; at least one.
async fn find(args: &KeyArgs, store: &OpenStore) -> Result<Vec<Entry>, Failure> {
    let kind = args.filter.kind;
    let key = key(&args.key, kind)?;
    let mut pages = Pages::new(store, args.filter.filter(Some(key.as_str())));
    let mut found = Vec::new();
    while let Some(page) = pages.next().await? {
        // A record that cannot be read may be the one that is meant.
        if !page.unreadable.is_empty() {
            return Err(Failure::failed(format!("store: {}", page.unreadable.join("\n  "))));
        }
        let wanted = |entry: &Entry| kind.has(entry) && State::of(&entry.record, entry.now) != State::Expired;
        found.extend(page.entries.into_iter().filter(wanted));
    }
    if found.is_empty() {
        return Err(Failure::failed(format!("there is no such {}: {key}", kind.noun())));
    }
    Ok(found)
}

/// The one that matches.
async fn find_one(args: &KeyArgs, store: &OpenStore) -> Result<Entry, Failure> {
    let mut found = find(args, store).await?;
    if found.len() > 1 {
        let mut message = format!(
            "{} {}s match; say which with {}:\n",
            found.len(),
            args.filter.kind.noun(),
            args.filter.kind.filters()
        );
        message.push_str(&view::candidates(&found));
        return Err(Failure::usage(message));
    }
    found.pop().ok_or_else(|| Failure::failed("there is no such key"))
}

/// The key as an operator copies it: from a header with its quotes, or bare.
fn key(text: &str, kind: Kind) -> Result<Key, Failure> {
    if kind == Kind::Keys
        && text.starts_with('"')
        && let Ok(key) = Key::from_field(text.as_bytes())
    {
        return Ok(key);
    }
    Key::new(text).map_err(|error| Failure::usage(error.to_string()))
}

fn still_running(entry: &Entry, verb: &str) -> Failure {
    let left = match entry.record.state {
        Stored::Running { lease_until } => lease_until.since(entry.now),
        Stored::Done { .. } => Duration::ZERO,
    };
    Failure::usage(format!(
        "the work may be running: its lease ends in {} s; wait, or {verb} it with --force",
        left.as_secs().max(1)
    ))
}

fn changed_meanwhile() -> Failure {
    Failure::failed(
        "the key changed in the meantime, so nothing was done; look at it again with `onlyonce keys show`",
    )
}

fn body(text: Option<&str>) -> Result<Bytes, Failure> {
    text.map_or_else(|| Ok(Bytes::new()), |text| bytes("--body", text))
}

/// What a flag says, or the bytes of the file that it names.
pub(crate) fn bytes(flag: &str, text: &str) -> Result<Bytes, Failure> {
    let Some(path) = text.strip_prefix('@') else { return Ok(Bytes::copy_from_slice(text.as_bytes())) };
    let read = if path == "-" {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    read.map(Bytes::from).map_err(|error| Failure::usage(format!("{flag} {text}: {error}")))
}

pub(crate) fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let malformed = || "a header line is NAME: VALUE, such as 'content-type: application/json'".to_owned();
    let (name, value) = text.split_once(':').ok_or_else(malformed)?;
    let name: HeaderName = name.trim().parse().map_err(|_| malformed())?;
    Ok((name, value.trim().parse().map_err(|_| malformed())?))
}

/// The header lines, unless the layer would not record one of them from a service: it could not be given
/// again either.
fn recordable(lines: &[(HeaderName, HeaderValue)], record_cookies: bool) -> Result<HeaderMap, Failure> {
    let headers: HeaderMap = lines.iter().cloned().collect();
    let recorded = onlyonce::recorded_headers(&headers, record_cookies);
    let refused = headers.keys().find(|name| {
        let ours = **name == onlyonce::IDEMPOTENT_REPLAYED || name.as_str().starts_with("onlyonce-");
        ours || !recorded.contains_key(*name)
    });
    match refused {
        Some(name) => Err(Failure::usage(format!(
            "--header {name}: is never recorded; it belongs to one connection, one moment or one session, or \
             is set by the proxy"
        ))),
        None => Ok(recorded),
    }
}

/// The retention under which the record was written: its route's, when the key was claimed.
fn asked_retention(record: &Record) -> Duration {
    match record.state {
        Stored::Running { lease_until } => record.expires_at.since(lease_until),
        Stored::Done { completed_at, .. } => record.expires_at.since(completed_at),
    }
}

/// The records that match a filter, a page at a time, so that millions need no memory.
pub(crate) struct Pages<'a> {
    store: &'a OpenStore,
    filter: Filter,
    after: Option<Cursor>,
    ended: bool,
}

impl<'a> Pages<'a> {
    pub(crate) fn new(store: &'a OpenStore, filter: Filter) -> Self {
        Self { store, filter, after: None, ended: false }
    }

    /// `None` after the last page.
    pub(crate) async fn next(&mut self) -> Result<Option<Page>, StoreError> {
        if self.ended {
            return Ok(None);
        }
        let page = self.store.page(&self.filter, self.after.as_ref(), PAGE_ROWS).await?;
        self.after.clone_from(&page.next);
        self.ended = page.next.is_none();
        Ok(Some(page))
    }
}

#[cfg(test)]
mod tests;
