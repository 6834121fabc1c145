//! The command line: what can be asked, and how each answer ends.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{BoolishValueParser, Resettable};
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use onlyonce_core::store::OpenError;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::{ConfigError, ProxyConfig};
use crate::inbox::{self, InboxCommand};
use crate::keys::{self, KeysCommand};
use crate::proxy::{self, Running, StartError, Stopped};
use crate::run::keeper;
use crate::runs::{self, RunsCommand};
use crate::telemetry::{self, LogFormat};
use crate::{demo, doctor, migrate, run, send};

/// The exit code of what was asked for and did not work.
pub const FAILED: u8 = 1;
/// The exit code of wrong usage or configuration.
pub const USAGE: u8 = 2;

/// Makes retries safe: the work happens once, and whoever asks again gets the first answer.
#[derive(Debug, Parser)]
#[command(name = "onlyonce", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    /// How logs are written, to standard error; ONLYONCE_LOG=debug or RUST_LOG filters them
    #[arg(
        long,
        global = true,
        env = "ONLYONCE_LOG_FORMAT",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  onlyonce demo
      Shows in ten seconds what it does.
  onlyonce proxy --upstream http://127.0.0.1:3000
      Puts the proxy in front of an API. Then send a request twice with one key:
      curl -d amount=10 -H 'Idempotency-Key: order-4711' http://127.0.0.1:8080/payments
  onlyonce send POST http://127.0.0.1:8080/payments --data amount=10 --intent order-4711
      Sends a request until its outcome is known, with one key, also across a crash.
  onlyonce run --job billing --every month --tz Europe/Berlin -- ./bill.sh
      Runs a command once for each month, however often and wherever it is started.
  onlyonce keys list
      Shows what the proxy remembers.
  onlyonce doctor
      Says whether store and upstream are as they should be.

Settings: a flag beats its ONLYONCE_* variable, which beats the --config file, which beats DATABASE_URL
(for the store), which beats the default.

Exit codes: 0 done, 1 failed (a busy port, an absent database or key), 2 wrong usage or configuration.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Watch a payments API with and without the proxy
    Demo(demo::DemoArgs),
    /// Run the reverse proxy in front of an API
    Proxy(Box<ProxyArgs>),
    /// Look after the keys that the store remembers, also while the proxy runs
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Look after the messages that consumers have processed
    #[command(subcommand)]
    Inbox(InboxCommand),
    /// Create the store or bring its schema up to date
    Migrate(migrate::MigrateArgs),
    /// Send a request with one key until its outcome is known
    Send(Box<send::SendArgs>),
    /// Run a command once for each period: what a crontab starts, on however many hosts
    Run(Box<run::RunArgs>),
    /// Show which periods were run, by whom, and which are missing
    #[command(subcommand)]
    Runs(RunsCommand),
    /// Keep a command for `onlyonce run`
    #[command(name = run::KEEPER, hide = true)]
    Keeper(keeper::KeeperArgs),
    /// Check store, upstream and configuration
    Doctor(doctor::DoctorArgs),
}

/// Which store a command works on.
#[derive(Args, Clone, Debug, Default)]
pub struct StoreArgs {
    /// Where keys are kept: sqlite:PATH or postgres://... [default: sqlite:onlyonce.db]
    #[arg(long, env = "ONLYONCE_STORE", hide_env_values = true, value_name = "URL")]
    pub store: Option<String>,
    /// The TOML file with the settings
    #[arg(long, env = "ONLYONCE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Use a store that can forget what it acknowledged, for tests only
    #[arg(
        long,
        env = "ONLYONCE_ALLOW_VOLATILE",
        action = ArgAction::SetTrue,
        value_parser = BoolishValueParser::new()
    )]
    pub allow_volatile: bool,
    /// `DATABASE_URL`, which counts if nothing else names a store.
    #[arg(skip)]
    pub database_url: Option<String>,
}

/// What `onlyonce proxy` is told.
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = PROXY_EXAMPLES)]
pub struct ProxyArgs {
    /// The API: http://HOST:PORT or https://HOST, with a path to put before every request's if need be
    #[arg(long, env = "ONLYONCE_UPSTREAM", hide_env_values = true, value_name = "URL")]
    pub upstream: Option<String>,
    /// Where to listen; port 0 takes a free one [default: 127.0.0.1:8080]
    #[arg(long, env = "ONLYONCE_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Where /healthz, /readyz and /metrics are [default: 127.0.0.1:8081]
    #[arg(long, env = "ONLYONCE_ADMIN", value_name = "HOST:PORT")]
    pub admin: Option<String>,
    /// Which API this is; two APIs on one store need two names [default: default]
    #[arg(long, env = "ONLYONCE_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    /// Who asks: authorization, none or header:NAME; a token's claim in the --config file
    #[arg(long, env = "ONLYONCE_CALLER", value_name = "CALLER")]
    pub caller: Option<String>,
    /// The store.
    #[command(flatten)]
    pub store: StoreArgs,
}

const PROXY_EXAMPLES: &str = "\
Examples:
  onlyonce proxy --upstream http://127.0.0.1:3000
  onlyonce proxy --upstream https://api.internal/v1 --listen 0.0.0.0:8080 --store sqlite:/var/lib/onlyonce/keys.db
  onlyonce proxy --config onlyonce.toml

A file may say all that flags can, and more:
  upstream = \"http://127.0.0.1:3000\"
  store    = \"sqlite:/var/lib/onlyonce/keys.db\"
  caller   = { header = \"x-user-id\" }   # or \"authorization\", \"none\", { jwt = { claim = \"sub\", jwks = \"URL\" } }

  [defaults]
  timeout   = \"60s\"                     # the lease is 15 s longer unless it is set
  retention = \"24h\"

  [[route]]
  match = \"POST /payments/{*rest}\"
  key   = \"required\"                    # a request without a key is refused

POST and PATCH requests that carry an Idempotency-Key are guarded; everything else streams through.
SIGTERM and SIGINT: no more requests, guarded work is finished, then exit. A second one leaves at once.";

impl Cli {
    /// The command line of this process.
    #[must_use]
    pub fn from_process() -> Self {
        let command = without_empty_variables(Self::command());
        let mut cli = Self::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit());
        let database_url = std::env::var("DATABASE_URL").ok().filter(|url| !url.is_empty());
        if let Some(store) = cli.store_args() {
            store.database_url = database_url;
        }
        cli
    }

    /// `None` where the store is not the person's to choose.
    fn store_args(&mut self) -> Option<&mut StoreArgs> {
        match &mut self.command {
            Command::Demo(_) | Command::Send(_) | Command::Keeper(_) => None,
            Command::Proxy(args) => Some(&mut args.store),
            Command::Keys(command) => Some(command.store_args()),
            Command::Inbox(command) => Some(command.store_args()),
            Command::Migrate(args) => Some(&mut args.store),
            Command::Run(args) => Some(&mut args.store),
            Command::Runs(command) => Some(command.store_args()),
            Command::Doctor(args) => Some(&mut args.store),
        }
    }

    /// Does what was asked.
    pub async fn run(self) -> ExitCode {
        // What a command has to say to a person is its output; its logs are for when that is not enough.
        let level = match self.command {
            Command::Proxy(_) => "info",
            // Things go wrong there on purpose.
            Command::Demo(_) => "off",
            _ => "warn",
        };
        telemetry::start_logs(self.log_format, level);
        let result = match self.command {
            Command::Demo(args) => demo::run(args).await,
            Command::Proxy(args) => serve(&args, self.log_format).await,
            Command::Keys(command) => keys::run(command, &mut std::io::stdout().lock()).await,
            Command::Inbox(command) => inbox::run(command, &mut std::io::stdout().lock()).await,
            Command::Migrate(args) => migrate::run(&args, &mut std::io::stdout().lock()).await,
            Command::Send(args) => send::run(*args, &mut std::io::stdout().lock()).await,
            Command::Run(args) => run::run(*args).await,
            Command::Runs(command) => runs::run(command, &mut std::io::stdout().lock()).await,
            Command::Keeper(args) => keeper::run(&args),
            Command::Doctor(args) => doctor::run(&args, &mut std::io::stdout().lock()).await,
        };
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                if let Some(message) = &failure.message {
                    // The exit code counts, whether or not somebody reads this.
                    let _ = writeln!(std::io::stderr(), "onlyonce: {message}");
                }
                ExitCode::from(failure.code)
            }
        }
    }
}

/// An empty variable is none, as an empty `DATABASE_URL` is: that is how deployments leave one out.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let empty = |arg: &clap::Arg| {
        let variable = arg.get_env().and_then(std::env::var_os);
        variable.is_some_and(|value| value.is_empty())
    };
    command
        .mut_args(|arg| if empty(&arg) { arg.env(Resettable::Reset) } else { arg })
        .mut_subcommands(without_empty_variables)
}

/// Why a command ends with another exit code than 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    /// What is said about it, unless the output says it all.
    pub message: Option<String>,
}

impl Failure {
    /// Something that did not work.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { code: FAILED, message: Some(message.into()) }
    }

    /// Wrong usage or configuration.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, message: Some(message.into()) }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Refused(reason) => Self::usage(reason),
            StartError::Failed(reason) => Self::failed(reason),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        StartError::from(error).into()
    }
}

impl From<onlyonce_core::StoreError> for Failure {
    fn from(error: onlyonce_core::StoreError) -> Self {
        Self::failed(format!("store: {error}"))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            // `onlyonce keys list | head`: whoever read has read enough.
            std::io::ErrorKind::BrokenPipe => Self { code: 0, message: None },
            _ => Self::failed(format!("the output cannot be written: {error}")),
        }
    }
}

async fn serve(args: &ProxyArgs, format: LogFormat) -> Result<(), Failure> {
    let config = ProxyConfig::load(args)?;
    let (upstream, store) = (config.upstream.to_string(), config.store.to_string());
    // Before anything is opened, so that no signal finds the process unprepared.
    let mut signals = Signals::new()?;
    let starting = proxy::start(config);
    let running = tokio::select! {
        started = starting => started?,
        () = signals.next() => return Ok(()),
    };
    announce(&running, format, &upstream, &store);
    signals.next().await;
    running.shutdown();
    tokio::select! {
        stopped = running.stopped() => match stopped {
            Stopped::Drained => Ok(()),
            Stopped::LeftRunning => Err(Failure::failed(
                "stopped while guarded work was running; its keys are held until their leases end",
            )),
        },
        () = signals.next() => {
            // The runtime would wait for its tasks.
            eprintln!("onlyonce: told twice to stop; leaving at once");
            std::process::exit(i32::from(FAILED));
        }
    }
}

/// Says where the proxy listens, whatever the logs are filtered to.
fn announce(running: &Running, format: LogFormat, upstream: &str, store: &str) {
    let (listen, admin) = (running.addr(), running.admin_addr());
    match format {
        LogFormat::Text => eprintln!(
            "onlyonce: listening on http://{listen}, admin on http://{admin}, upstream {upstream}, store {store}"
        ),
        // As the log would write it, for whoever reads lines of one form.
        LogFormat::Json => eprintln!(
            "{}",
            serde_json::json!({
                "timestamp": format!("{:.6}", jiff::Timestamp::now()),
                "level": "INFO",
                "message": "listening",
                "listen": listen.to_string(),
                "admin": admin.to_string(),
                "upstream": upstream,
                "store": store,
                "target": module_path!(),
            })
        ),
    }
    let checked = upstream.to_owned();
    let address = crate::upstream::Upstream::parse(upstream).map(|upstream| upstream.address());
    tokio::spawn(async move {
        if let Ok(address) = address
            && let Err(reason) = crate::admin::reach(&address).await
        {
            tracing::warn!(upstream = checked, "{reason}; requests get 502 until it can");
        }
    });
}

/// The signals that ask a process to stop.
pub(crate) struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::failed(format!("signals cannot be received: {error}")))
        };
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Reads a duration for a flag.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    crate::duration::parse(text).map_err(|error| error.to_string())
}
