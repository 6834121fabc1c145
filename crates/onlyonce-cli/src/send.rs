//! `onlyonce send`: one request from a shell, sent with one key until its outcome is known.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{ArgGroup, Args};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use onlyonce_client::{
    Answer, BuildError, Call, Client, Entry, Error, Journal, JournalError, JournalOptions, Key, Receipt,
    Settings, Work,
};
use serde_json::{Value, json};

use crate::cli::{FAILED, Failure, USAGE, duration};
use crate::keys;

/// The exit code where the work may have happened and nobody on this side knows.
pub const UNSETTLED: u8 = 3;

/// What `onlyonce send` is told.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
#[command(group = ArgGroup::new("instead").args(["resume", "list", "forget", "purge"]))]
pub struct SendArgs {
    /// POST and PATCH are given a key; GET, HEAD, PUT and DELETE are sent as they are unless --key or --intent
    /// gives them one
    #[arg(required_unless_present = "instead", conflicts_with = "instead")]
    method: Option<Method>,
    /// Where to
    #[arg(required_unless_present = "instead", conflicts_with = "instead")]
    url: Option<String>,
    /// The body; @FILE takes a file's bytes, @- standard input [default: empty]
    #[arg(short, long, value_name = "TEXT or @FILE", conflicts_with = "instead")]
    data: Option<String>,
    /// A header line, such as 'content-type: application/json'; may be repeated
    #[arg(short = 'H', long, value_name = "NAME: VALUE", value_parser = keys::header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// What is to happen once, such as order-4711. It is written to the journal before anything is sent, and
    /// the same intent again gives the recorded answer
    #[arg(long, value_name = "NAME", conflicts_with = "instead")]
    intent: Option<String>,
    /// The Idempotency-Key [default: derived from the intent, or a fresh one]
    #[arg(long, value_name = "KEY", value_parser = key, conflicts_with = "instead")]
    key: Option<Key>,
    /// How long all attempts may take together
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    deadline: Duration,
    /// How long one attempt may take, from connecting to the end of the answer
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = duration)]
    attempt_timeout: Duration,
    /// For how long the server remembers a key. An unfinished intent that is older is not sent again
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
    retention: Duration,
    /// The file with the intents [default: onlyonce/journal.db in $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, env = "ONLYONCE_JOURNAL", value_name = "PATH")]
    journal: Option<PathBuf>,
    /// A header that is not written to the journal, such as authorization; --resume then wants it again with
    /// --header. May be repeated
    #[arg(long, value_name = "NAME")]
    keep_out: Vec<HeaderName>,
    /// For how long answers stay in the journal
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = duration)]
    keep_answers: Duration,
    /// Send every unfinished intent of the journal again, with its key
    #[arg(long)]
    resume: bool,
    /// List the intents of the journal
    #[arg(long)]
    list: bool,
    /// Remove an intent from the journal, once it is known whether it happened
    #[arg(long, value_name = "INTENT")]
    forget: Option<String>,
    /// Remove answers older than --keep-answers; that happens by itself whenever the journal is opened
    #[arg(long)]
    purge: bool,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  onlyonce send POST https://api.example/payments --data amount=10 --intent order-4711
      Sends until the outcome is known: timeouts, lost answers, 409 in flight, 425, 429 and 5xx are tried
      again with the same key. Run it again, after a crash too: the same intent is given the same answer.
  onlyonce send POST https://api.example/payments --data @payment.json -H 'content-type: application/json'
      The same without a journal: a fresh key, kept for all attempts of this run.
  onlyonce send --list
      Shows what the journal has.
  onlyonce send --resume
      Finishes what a crash left unfinished.

An intent is what a person wants once (an order id), not a call and not a hash of the body: two equal
payments can both be meant. The body of the answer goes to standard output, everything else to standard
error. The journal is readable for its owner only; it holds requests with their headers until they are answered.

Exit codes:
  0  answered with 2xx
  1  answered with another status, or failed and the work was not done
  2  wrong usage; nothing was sent
  3  the work was or may have been done: run the same again, or --resume. An intent that is older than the server's
     memory (--retention) is not sent again: find out whether it happened, then --forget it";

/// Does what was asked.
///
/// # Errors
/// With the exit code that the command documents.
pub async fn run(args: SendArgs, out: &mut impl Write) -> Result<(), Failure> {
    if args.list || args.purge || args.forget.is_some() {
        return look_after(&args, out).await.map_err(|failure| match failure.code {
            // Nothing was to be sent.
            UNSETTLED => Failure { code: FAILED, ..failure },
            _ => failure,
        });
    }
    let client = client(&args)?;
    if args.resume {
        let client = client.with_journal(open(&args).await?);
        return resume(&args, &client, out).await;
    }
    let client = if args.intent.is_some() { client.with_journal(open(&args).await?) } else { client };
    let call = call(&args, &client)?;
    match call.send().await {
        Ok(answer) => report(&args, &answer, out),
        Err(error) => {
            let written = match args.json {
                true => say(out, &failed(&error, args.intent.as_deref())),
                false => Ok(()),
            };
            told(written, Err(error.into()))
        }
    }
}

fn client(args: &SendArgs) -> Result<Client, Failure> {
    let mut settings = Settings::default();
    settings.deadline = args.deadline;
    settings.attempt_timeout = args.attempt_timeout;
    settings.server_retention = args.retention;
    let http = onlyonce_client::http()?.user_agent(concat!("onlyonce/", env!("CARGO_PKG_VERSION")));
    Ok(Client::with_http(http, settings)?)
}

fn call(args: &SendArgs, client: &Client) -> Result<Call, Failure> {
    let (Some(method), Some(url)) = (&args.method, &args.url) else {
        return Err(Failure::usage("METHOD and URL are missing"));
    };
    let mut call = client.call(method.clone(), url);
    for (name, value) in &args.header {
        call = call.header(name, value.clone());
    }
    if let Some(data) = &args.data {
        call = call.body(keys::bytes("--data", data)?);
    }
    if let Some(intent) = &args.intent {
        call = call.intent(intent);
    }
    if let Some(key) = &args.key {
        call = call.key(key.clone());
    }
    Ok(call)
}

fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}

/// Prints the answer, and fails unless it is a success.
fn report(args: &SendArgs, answer: &Answer, out: &mut impl Write) -> Result<(), Failure> {
    let written = match args.json {
        true => say(out, &answered(answer, args.intent.as_deref())),
        false => out.write_all(&answer.body).and_then(|()| out.flush()),
    };
    note(&summary(answer));
    told(written, verdict(answer))
}

fn say(out: &mut impl Write, value: &Value) -> io::Result<()> {
    writeln!(out, "{value}")?;
    out.flush()
}

/// To standard error, whether or not somebody reads it: what happened is not changed by that.
fn note(said: &str) {
    let _ = writeln!(io::stderr(), "onlyonce: {said}");
}

/// The verdict, whether or not somebody reads the output. One that could not be written is not known.
fn told(written: io::Result<()>, verdict: Result<(), Failure>) -> Result<(), Failure> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let said = verdict.err().and_then(|failure| failure.message).map(|said| format!("{said}; "));
            let said = said.unwrap_or_default();
            let message = format!("{said}the output cannot be written: {error}");
            Err(Failure { code: UNSETTLED, message: Some(message) })
        }
        _ => verdict,
    }
}

fn verdict(answer: &Answer) -> Result<(), Failure> {
    if answer.status.is_success() { Ok(()) } else { Err(Failure { code: FAILED, message: None }) }
}

/// One line about an answer: `201 Created, key …, 2 attempts, replayed`.
fn summary(answer: &Answer) -> String {
    let Receipt { key, attempts, replayed, recorded, .. } = &answer.receipt;
    let mut said = vec![answer.status.to_string()];
    said.extend(key.as_ref().map(|key| format!("key {key}")));
    said.push(if *attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") });
    if *replayed {
        said.push("replayed by the server".to_owned());
    }
    if *recorded {
        said.push("from the journal, nothing was sent".to_owned());
    }
    said.join(", ")
}

fn answered(answer: &Answer, intent: Option<&str>) -> Value {
    let Receipt { key, attempts, replayed, recorded, .. } = &answer.receipt;
    let headers: Vec<_> = answer
        .headers
        .iter()
        .map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())]))
        .collect();
    let mut said = json!({
        "intent": intent,
        "key": key.as_ref().map(Key::as_str),
        "status": answer.status.as_u16(),
        "attempts": attempts,
        "replayed": replayed,
        "recorded": recorded,
        "headers": headers,
    });
    let (name, body) = match std::str::from_utf8(&answer.body) {
        Ok(text) => ("body", text.to_owned()),
        Err(_) => ("body_hex", answer.body.iter().map(|byte| format!("{byte:02x}")).collect()),
    };
    said[name] = body.into();
    said
}

fn failed(error: &Error, intent: Option<&str>) -> Value {
    let work = match error.work() {
        Work::NotDone => "not done",
        Work::MayBeDone => "may be done",
        Work::Done => "done",
    };
    let differs = match error {
        Error::Refused(refused) => refused.differs.clone(),
        Error::IntentReused { differs, .. } => differs.iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    };
    let key = error.key().map(Key::as_str);
    let code = match error {
        Error::Refused(refused) => Some(&*refused.code),
        _ => None,
    };
    json!({ "intent": intent, "key": key, "error": error.to_string(), "code": code, "differs": differs, "work": work })
}

async fn resume(args: &SendArgs, client: &Client, out: &mut impl Write) -> Result<(), Failure> {
    let supplied: HeaderMap = args.header.iter().cloned().collect();
    let resumed = client.resume(&supplied).await?;
    let mut worst = 0;
    let mut lines = Vec::new();
    let mut written = Ok(());
    for intent in &resumed {
        let name = &intent.intent;
        let (line, code, said) = match &intent.outcome {
            Ok(answer) => {
                let code = verdict(answer).map_or_else(|failure| failure.code, |()| 0);
                (answered(answer, Some(name)), code, summary(answer))
            }
            Err(error) => (failed(error, Some(name)), code(error), error.to_string()),
        };
        worst = worst.max(code);
        lines.push(line);
        if !args.json {
            written = written.and_then(|()| writeln!(out, "{}: {}", plain(name), plain(&said)));
        }
    }
    if args.json {
        written = say(out, &Value::Array(lines));
    } else if resumed.is_empty() {
        note("nothing is unfinished");
    }
    told(written, if worst == 0 { Ok(()) } else { Err(Failure { code: worst, message: None }) })
}

async fn look_after(args: &SendArgs, out: &mut impl Write) -> Result<(), Failure> {
    let journal = open(args).await?;
    if let Some(intent) = &args.forget {
        return match journal.forget(intent).await? {
            true => Ok(()),
            false => Err(Failure::failed(format!("the journal has no intent {intent:?}"))),
        };
    }
    if args.purge {
        // Opening it has removed some already.
        journal.purge().await?;
        return Ok(());
    }
    let entries = journal.entries().await?;
    if args.json {
        let entries: Vec<_> = entries.iter().map(|entry| row(entry, args.retention)).collect();
        writeln!(out, "{}", Value::Array(entries))?;
        return Ok(());
    }
    for entry in &entries {
        let state = state(entry, args.retention);
        let status = entry.answered.map(|(_, status)| format!(" {status}")).unwrap_or_default();
        let (at, Entry { method, url, .. }) = (rfc3339(entry.created_at), entry);
        let intent = plain(&entry.intent);
        writeln!(out, "{at}  {:<14}  {intent}  {method} {url}", format!("{state}{status}"))?;
        if let Some(error) = &entry.last_error {
            writeln!(out, "    {}", plain(error))?;
        }
    }
    Ok(())
}

fn row(entry: &Entry, retention: Duration) -> Value {
    json!({
        "intent": entry.intent,
        "state": state(entry, retention),
        "status": entry.answered.map(|(_, status)| status),
        "key": entry.key,
        "method": entry.method,
        "url": entry.url,
        "created_at": rfc3339(entry.created_at),
        "answered_at": entry.answered.map(|(at, _)| rfc3339(at)),
        "attempts": entry.attempts,
        "last_error": entry.last_error,
        "bytes": entry.bytes,
    })
}

/// In one line, and without what a terminal would obey: some of it are a server's words.
fn plain(text: &str) -> String {
    text.chars()
        .flat_map(|char| {
            let escaped = char.is_control().then(|| char.escape_default());
            escaped.into_iter().flatten().chain((!char.is_control()).then_some(char))
        })
        .collect()
}

fn state(entry: &Entry, retention: Duration) -> &'static str {
    let age = SystemTime::now().duration_since(entry.created_at).unwrap_or_default();
    match entry.answered {
        Some(_) => "answered",
        None if age > retention => "unknown",
        None => "unfinished",
    }
}

fn rfc3339(at: SystemTime) -> String {
    jiff::Timestamp::try_from(at).map_or_else(|_| "?".to_owned(), |at| format!("{at:.3}"))
}

async fn open(args: &SendArgs) -> Result<Journal, Failure> {
    let path = match &args.journal {
        Some(path) => path.clone(),
        None => default_journal()?,
    };
    let mut options = JournalOptions::default();
    options.keep_answers = args.keep_answers;
    options.keep_out.clone_from(&args.keep_out);
    Ok(Journal::open(path, options).await?)
}

/// In the folder for what programs remember, which is created for its owner alone.
fn default_journal() -> Result<PathBuf, Failure> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("XDG_STATE_HOME")
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(variable("HOME")?.join(".local/state")))
        .ok_or_else(|| Failure::usage("there is no home folder for the journal; say --journal PATH"))?
        .join("onlyonce");
    let mut builder = std::fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(builder.recursive(true), 0o700);
    builder.create(&folder).map_err(|error| {
        Failure::usage(format!("the folder {} cannot be created: {error}", folder.display()))
    })?;
    Ok(folder.join("journal.db"))
}

fn code(error: &Error) -> u8 {
    match (error, error.work()) {
        (Error::Key(_) | Error::Request { .. } | Error::IntentReused { .. }, _) => USAGE,
        (Error::Journal(JournalError::Refused(_)), _) => USAGE,
        (_, Work::NotDone) => FAILED,
        _ => UNSETTLED,
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { code: code(&error), message: Some(plain(&error.to_string())) }
    }
}

impl From<JournalError> for Failure {
    fn from(error: JournalError) -> Self {
        Error::from(error).into()
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::Settings(error) => Self::usage(error.to_string()),
            other => Self::failed(other.to_string()),
        }
    }
}
