//! `onlyonce demo`: a payments API, first called directly and then through the proxy, by callers that
//! retry as callers do.

mod api;
mod client;
mod scenarios;
mod table;

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use onlyonce::Settings;
use onlyonce::settings::OnConcurrent;
use onlyonce_core::Lapse;

use crate::cli::{Failure, Signals};
use crate::config::ProxyConfig;
use crate::proxy::{self, Running};
use crate::store::StoreUrl;
use crate::upstream::Upstream;
use api::Api;
use client::Client;
use scenarios::{SCENARIOS, Scenario};
use table::{Row, Side};

/// What `onlyonce demo` is told.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(after_help = EXAMPLES)]
pub struct DemoArgs {
    /// Leave the API and the proxy running afterwards, with requests to try.
    #[arg(long)]
    pub serve: bool,
}

const EXAMPLES: &str = "\
Examples:
  onlyonce demo
  onlyonce demo --serve

Five ways in which a payment is sent more than once, each against a fresh API: straight, and through the proxy.
Nothing is left behind. Exit code 1 if a payment behind the proxy went through more or less often than it should.";

/// The API's work takes about half a second, so a short lease is enough, and the demo does not take long.
const TIMEOUT: Duration = Duration::from_secs(2);
pub(crate) const LEASE: Duration = Duration::from_secs(3);

/// Runs the demo and prints its table. Fails if a payment went through more or less often than it should
/// have.
///
/// # Errors
/// When the API or the proxy cannot be started.
pub async fn run(args: DemoArgs) -> Result<(), Failure> {
    let folder = Folder::create()?;
    println!(
        "A payments API with its own ledger, called by clients that retry: straight, and through `onlyonce proxy`.\n"
    );
    let mut rows = Vec::new();
    for (at, scenario) in SCENARIOS.iter().enumerate() {
        progress(&format!("{} of {}: {} …", at + 1, SCENARIOS.len(), scenario.title));
        let keys = folder.0.join(format!("{at}.db"));
        let (straight, guarded) = tokio::try_join!(side(scenario, None), side(scenario, Some(&keys)))?;
        rows.push(Row { title: scenario.title, due: scenario.due, straight, guarded });
    }
    progress("");
    print!("{}", table::render(&rows, std::io::stdout().is_terminal()));
    let as_it_should = rows.iter().all(|row| row.guarded.charged == row.due);
    if !as_it_should {
        return Err(Failure::failed("the ledger behind the proxy is not as it should be"));
    }
    if args.serve {
        serve(&folder.0.join("serve.db")).await?;
    } else {
        println!(
            "Try it yourself: `onlyonce demo --serve`. For your own API: `onlyonce proxy --upstream URL`."
        );
    }
    Ok(())
}

/// Plays a scenario against a fresh API, through a fresh proxy if there is a file for its keys.
async fn side(scenario: &Scenario, keys: Option<&Path>) -> Result<Side, Failure> {
    let api = Api::start(ANY_PORT).await?;
    let proxy = match keys {
        Some(keys) => Some(start_proxy(&api, keys, ANY_PORT).await?),
        None => None,
    };
    let target = proxy.as_ref().map_or(api.addr(), Running::addr);
    let saw = (scenario.play)(Client::new(target), api.clone()).await;
    if let Some(proxy) = proxy {
        proxy.shutdown();
        proxy.stopped().await;
    }
    Ok(Side { saw, charged: api.charges().len() })
}

const ANY_PORT: &str = "127.0.0.1:0";

async fn start_proxy(api: &Api, keys: &Path, listen: &str) -> Result<Running, Failure> {
    let upstream = Upstream::parse(&format!("http://{}", api.addr())).map_err(failed)?;
    let config = ProxyConfig {
        listen: listen.to_owned(),
        admin: ANY_PORT.to_owned(),
        defaults: Settings {
            timeout: TIMEOUT,
            lease: Some(LEASE),
            // A payment is not to be made twice, whatever happens: after a crash a person decides.
            on_lapse: Lapse::Hold,
            // Copies are told the answer instead of being told to come back.
            on_concurrent: OnConcurrent::Wait,
            ..Settings::default()
        },
        ..ProxyConfig::new(upstream, StoreUrl::file(keys))
    };
    Ok(proxy::start(config).await?)
}

const SERVED_API: &str = "127.0.0.1:3000";
const SERVED_PROXY: &str = "127.0.0.1:8080";

async fn serve(keys: &Path) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    // The usual ports if they are free, others if not: a demo should not fail on that.
    let api = match Api::start(SERVED_API).await {
        Ok(api) => api,
        Err(_) => Api::start(ANY_PORT).await?,
    };
    api.fail_once("flaky");
    api.die_after_charging("dying");
    let proxy = match start_proxy(&api, keys, SERVED_PROXY).await {
        Ok(proxy) => proxy,
        Err(_) => start_proxy(&api, keys, ANY_PORT).await?,
    };
    print!("{}", lines_to_try(api.addr(), proxy.addr(), proxy.admin_addr(), keys));
    std::io::stdout().flush().map_err(failed)?;
    signals.next().await;
    proxy.shutdown();
    proxy.stopped().await;
    Ok(())
}

fn lines_to_try(api: SocketAddr, proxy: SocketAddr, admin: SocketAddr, keys: &Path) -> String {
    let pay = |order: &str, amount: u32| {
        format!(
            "curl -i http://{proxy}/payments -H 'Idempotency-Key: {order}' -H 'Content-Type: application/json' -d '{{\"order\":\"{order}\",\"amount\":{amount}}}'"
        )
    };
    format!(
        "\
Running until Ctrl-C: the API on http://{api}, the proxy on http://{proxy}.

Pay, and send the same again (look for Idempotent-Replayed):
  {pay}

The same key for another amount (422):
  {edited}

An API that fails once (503, then 201), and one that dies after charging (502, then 409 until you decide):
  {flaky}
  {dying}

Decide that the dead one was charged; a retry is then answered so:
  onlyonce keys complete dying --status 201 --body '{{\"receipt\":2}}' --store sqlite:{keys}

What was charged, and what the keys say:
  curl http://{api}/ledger
  onlyonce keys list --store sqlite:{keys}
  curl http://{admin}/metrics
",
        pay = pay("order-1", 100),
        edited = pay("order-1", 999),
        flaky = pay("flaky", 50),
        dying = pay("dying", 70),
        keys = keys.display(),
    )
}

/// One line that the next overwrites, if a person is watching.
fn progress(line: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[2K{line}");
    }
}

/// A temporary folder that goes away with the demo.
struct Folder(std::path::PathBuf);

impl Folder {
    fn create() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("onlyonce-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Best effort: it is in the temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn failed(reason: impl Display) -> Failure {
    Failure::failed(reason.to_string())
}
