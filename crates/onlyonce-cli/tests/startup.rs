//! What the proxy starts on, what it refuses, and what it says about itself.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use support::{Proxy, Setup, Upstream, free_addr, get, onlyonce, post, run, text, until};

/// Where nothing ever listens; a refused start does not get that far.
const NOWHERE: &str = "http://127.0.0.1:9";

fn proxy(arguments: &[&str]) -> Command {
    let mut command = onlyonce();
    command.arg("proxy").args(arguments);
    command
}

/// Ends with this code and one line on standard error, which says all of this.
#[track_caller]
fn refused(command: Command, code: i32, says: &[&str]) {
    let shown = format!("{command:?}");
    let output = run(command);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), &*out), (Some(code), ""), "{shown}: {err}");
    assert_eq!(err.lines().count(), 1, "{shown}: {err}");
    for part in says {
        assert!(err.contains(part), "{shown}: no {part:?} in: {err}");
    }
}

/// As [`refused`], for the `--config` file of a proxy.
#[track_caller]
fn refused_file(setup: &Setup, code: i32, says: &[&str]) {
    refused(proxy(&["--config", setup.written().to_str().unwrap()]), code, says);
}

#[test]
fn a_setting_that_cannot_be_is_one_line_with_what_is_allowed() {
    // The file has four lines before these.
    for (config, says) in [
        ("colour = \"blue\"\n", &["onlyonce.toml:5", "`colour`", "expected one of", "`shutdown_grace`"][..]),
        ("[defaults]\ntimout = \"1s\"\n", &["onlyonce.toml:6", "`timout`", "`timeout`"]),
        ("[[route]]\nmatch = \"POST /x\"\nkeys = \"off\"\n", &["onlyonce.toml:7", "`keys`", "`key`"]),
        ("record_grace = 2\n", &["onlyonce.toml:5", "a duration in quotes", "60s"]),
        ("record_grace = \"2\"\n", &["onlyonce.toml:5", "\"2\"", "60s"]),
        ("allow_volatile = \"yes\"\n", &["onlyonce.toml:5", "a boolean"]),
        ("[defaults]\nrequest_body_bytes_max = -1\n", &["onlyonce.toml:6", "-1"]),
        ("caller = \"cookie\"\n", &["onlyonce.toml:5", "\"cookie\"", "\"authorization\", \"none\"", "jwt"]),
        ("caller = { jwt = { claim = \"sub\" } }\n", &["onlyonce.toml:5", "jwks"]),
        ("host = \"mine\"\n", &["onlyonce.toml:5", "\"mine\"", "\"preserve\"", "\"upstream\""]),
        ("sweep_every = \"0s\"\n", &["onlyonce.toml:5", "sweep_every", "longer than zero"]),
        ("[defaults]\non_lapse = \"wait\"\n", &["onlyonce.toml:6", "\"wait\"", "\"rerun\"", "\"hold\""]),
        (
            "[defaults]\ntimeout = \"10s\"\nlease = \"10s\"\n",
            &["onlyonce.toml:7", "lease", "must exceed timeout = 10s"],
        ),
        ("[defaults]\nretention = \"10s\"\n", &["onlyonce.toml:6", "retention", "at least lease = 75s"]),
        (
            "[[route]]\nmatch = \"POST /x\"\ntimeout = \"80s\"\nlease = \"75s\"\n",
            &["POST /x", "lease", "must exceed timeout = 80s"],
        ),
        ("[[route]]\nmatch = \"GET /x\"\n", &["onlyonce.toml:6", "GET", "never guarded"]),
        ("[[route]]\nmatch = \"POST,HEAD /x\"\n", &["onlyonce.toml:6", "HEAD", "never guarded"]),
        ("[[route]]\nmatch = \"/x\"\n", &["onlyonce.toml:6", "POST /payments"]),
        ("[[route]]\nkey = \"off\"\n", &["onlyonce.toml", "match"]),
        ("[defaults]\nkeep = [\"2xx\", \"502\"]\n", &["onlyonce.toml:6", "502", "keep", "unknown"]),
        ("[defaults]\nkeep = [\"2xx\", \"9xx\"]\n", &["onlyonce.toml:6", "9xx"]),
        ("colour = \n", &["onlyonce.toml:5"]),
    ] {
        refused_file(&Setup::new(NOWHERE).config(config), 2, says);
    }
}

#[test]
fn a_flag_that_cannot_be_is_refused_with_what_is_allowed() {
    let store = "--store=sqlite:/nowhere/keys.db";
    for (arguments, says) in [
        (&[store][..], &["upstream", "--upstream URL", "ONLYONCE_UPSTREAM"][..]),
        (&[store, "--upstream=127.0.0.1:3000"], &["--upstream", "http://HOST"]),
        (&[store, "--upstream=ftp://127.0.0.1"], &["--upstream", "http://HOST"]),
        (&[store, "--upstream=http://ann:hunter2@127.0.0.1"], &["--upstream", "credentials"]),
        (&[store, "--upstream", NOWHERE, "--listen=8080"], &["--listen", "HOST:PORT"]),
        (&[store, "--upstream", NOWHERE, "--admin=x:y"], &["--admin", "HOST:PORT"]),
        (&[store, "--upstream", NOWHERE, "--caller=cookie"], &["--caller", "header:NAME"]),
        (
            &[store, "--upstream", NOWHERE, "--listen=127.0.0.1:8099", "--admin=127.0.0.1:8099"],
            &["admin", "own"],
        ),
        (&["--upstream", NOWHERE, "--store=mysql://ann:hunter2@db/x"], &["--store", "sqlite:PATH"]),
        (
            &["--upstream", NOWHERE, "--store=sqlite:keys.db?colour=blue"],
            &["--store", "colour", "busy_timeout_ms"],
        ),
        (&["--upstream", NOWHERE, "--store=sqlite::memory:"], &["volatile", "allow_volatile"]),
        (&["--upstream", NOWHERE, "--store=sqlite:keys.db?synchronous=off"], &["volatile", "allow_volatile"]),
        (&["--config=/nowhere/onlyonce.toml"], &["/nowhere/onlyonce.toml", "--config"]),
    ] {
        refused(proxy(arguments), 2, says);
        let said = text(&run(proxy(arguments)).stderr);
        assert!(!said.contains("hunter2"), "{said}");
    }
    let unknown = run(proxy(&["--colour=blue"]));
    assert_eq!((unknown.status.code(), &*text(&unknown.stdout)), (Some(2), ""));
    assert!(text(&unknown.stderr).contains("--colour"), "{}", text(&unknown.stderr));
}

#[test]
fn a_file_that_is_not_a_store_of_ours_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let notes = folder.path().join("notes.txt");
    fs::write(&notes, "not a database\n".repeat(500)).unwrap();
    let foreign = folder.path().join("foreign.db");
    foreign_database(&foreign);
    for (path, says) in [
        (&notes, &["notes.txt", "is not a SQLite database"][..]),
        (&foreign, &["foreign.db", "belongs to another application", "a file of its own"]),
        (&folder.path().to_owned(), &["is a folder"]),
        (&folder.path().join("absent/keys.db"), &["absent", "does not exist"]),
    ] {
        let before = fs::read(path).ok();
        let store = format!("sqlite:{}", path.display());
        refused(proxy(&["--upstream", NOWHERE, "--store", &store]), 2, says);
        assert_eq!(fs::read(path).ok(), before, "{}", path.display());
    }
    let mut left: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["foreign.db", "notes.txt"], "nothing was left behind");
}

fn foreign_database(path: &Path) {
    use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
        let mut connection = options.connect().await.unwrap();
        sqlx::raw_sql("CREATE TABLE invoices (id INTEGER)").execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    });
}

#[test]
fn a_folder_that_takes_no_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    // Root may write anywhere but in what the kernel makes up.
    let writable = fs::write(folder.path().join("probe"), "").is_ok();
    let folder = if writable { Path::new("/proc") } else { folder.path() };
    let store = format!("sqlite:{}/keys.db", folder.display());
    refused(
        proxy(&["--upstream", NOWHERE, "--store", &store]),
        2,
        &["keys.db", "cannot be written", "folder"],
    );
}

#[test]
fn a_busy_port_is_no_fault_of_the_configuration() {
    let upstream = Upstream::start();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap();
    let setup = Setup::new(upstream.url()).listen(addr);
    refused_file(&setup, 1, &["listen", &addr.to_string(), "choose another HOST:PORT"]);
    drop(taken);
    let setup = Setup::new(upstream.url());
    let mut command = proxy(&["--config", setup.written().to_str().unwrap()]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    command.args(["--admin", &addr]);
    refused(command, 1, &["admin", &addr]);
}

#[test]
fn a_store_that_is_away_is_waited_for_and_then_said() {
    let setup = Setup::new(NOWHERE).config("store_start_wait = \"0s\"\n").store_query("busy_timeout_ms=50");
    let mut one = setup.start();
    one.terminate();
    one.ended();
    let lock = support::lock::Lock::take(&setup.database());
    // The lock alone keeps nobody from opening a store that is up to date.
    let proxy = setup.start();
    assert_eq!(get("/readyz").send_to(proxy.admin).status, 503);
    drop(lock);
    // A file that may not be created is absent until someone else makes it.
    let setup = Setup::new(NOWHERE).config("store_start_wait = \"0s\"\n").store_query("mode=rw");
    refused_file(&setup, 1, &["keys.db", "does not exist"]);
    let waits = Setup::new(NOWHERE).config("store_start_wait = \"25s\"\n").store_query("mode=rw");
    let creator = format!("sqlite:{}", waits.database().display());
    let starting = std::thread::spawn(move || waits.try_start().is_ok());
    let mut migrate = onlyonce();
    migrate.args(["migrate", "--store", &creator]);
    std::thread::sleep(support::millis(700));
    assert!(run(migrate).status.success());
    assert!(starting.join().unwrap(), "it starts when the store is there");
}

#[test]
fn an_upstream_that_is_away_is_no_reason_not_to_start() {
    let addr = free_addr();
    let proxy = Setup::new(format!("http://{addr}")).start();
    let ready = get("/readyz").send_to(proxy.admin);
    assert_eq!((ready.status, ready.json()["ready"].as_bool()), (503, Some(false)));
    assert!(ready.json()["reasons"][0].as_str().unwrap().contains(&addr.to_string()), "{ready:?}");
    assert_eq!(get("/healthz").send_to(proxy.admin).status, 200);
    until("it warns", || proxy.stderr().contains("cannot be reached"));
    assert_eq!(post("k").send(&proxy).refusal(), (502, "upstream-unreachable"));

    let mut upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let ready = get("/readyz").send_to(proxy.admin);
    assert_eq!((ready.status, ready.json()["ready"].as_bool()), (200, Some(true)));
    upstream.stop();
    assert_eq!(get("/readyz").send_to(proxy.admin).status, 503);
    upstream.start_again();
    assert_eq!(get("/readyz").send_to(proxy.admin).status, 200);
}

#[test]
fn metrics_count_what_happens() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(
        &upstream,
        "sweep_every = \"200ms\"\n[[route]]\nmatch = \"POST /brief\"\ntimeout = \"100ms\"\nlease = \"200ms\"\nretention = \"300ms\"\n",
    );
    let claims = |answer: &str| proxy.metric(&format!("onlyonce_claims_total{{answer=\"{answer}\"}}"));
    let answers = ["execute", "replay", "mismatch", "in_flight", "unknown", "store_error"];
    let counted = || answers.map(claims);
    assert_eq!(counted(), [0.0; 6], "all of them are there from the start");
    post("k").send(&proxy);
    post("k").send(&proxy);
    post("k").send(&proxy);
    post("k").body("amount=101").send(&proxy);
    get("/free").send(&proxy);
    let running = post("slow").order("before=2000").start(&proxy);
    until("the slow one runs", || upstream.received_for("slow") == 1);
    assert_eq!(proxy.metric("onlyonce_in_flight"), 1.0);
    post("slow").send(&proxy);
    running.join().unwrap();
    assert_eq!(counted(), [2.0, 2.0, 1.0, 1.0, 0.0, 0.0]);
    until("the gauge goes down", || proxy.metric("onlyonce_in_flight") == 0.0);
    assert!(proxy.metric("onlyonce_store_seconds_count{call=\"insert\",result=\"ok\"}") >= 6.0);
    post("brief").to("/brief").send(&proxy);
    until("what has expired is swept", || proxy.metric("onlyonce_swept_rows_total") >= 1.0);
    for name in
        ["onlyonce_lost_leases_total", "onlyonce_record_failures_total", "onlyonce_sweep_failures_total"]
    {
        let metrics = text(&get("/metrics").send_to(proxy.admin).body);
        assert!(metrics.contains(&format!("\n{name} 0\n")), "{name}");
    }
    assert_eq!(get("/elsewhere").send_to(proxy.admin).status, 404);
}

#[test]
fn every_command_explains_itself() {
    for command in [
        &[][..],
        &["proxy"],
        &["keys"],
        &["keys", "list"],
        &["keys", "show"],
        &["keys", "release"],
        &["keys", "complete"],
        &["keys", "purge"],
        &["migrate"],
        &["doctor"],
        &["demo"],
    ] {
        let mut help = onlyonce();
        help.args(command).arg("--help");
        let output = run(help);
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{command:?}");
        assert!(text(&output.stdout).contains("Usage: onlyonce"), "{command:?}");
    }
    let mut version = onlyonce();
    version.arg("--version");
    assert!(text(&run(version).stdout).starts_with("onlyonce "));
    let mut nothing = onlyonce();
    nothing.env("NO_COLOR", "1");
    assert_eq!(run(nothing).status.code(), Some(2));
}

#[test]
fn flags_beat_the_environment_which_beats_the_file_which_beats_database_url() {
    let upstreams: Vec<_> = (0..3).map(|_| Upstream::start()).collect();
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let store = |name: &str| format!("sqlite:{}", folder.path().join(name).display());
    let ports = "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n";
    let file = folder.path().join("onlyonce.toml");
    let says = format!("{ports}store = \"{}\"\nupstream = \"{}\"\n", store("file.db"), upstreams[0].url());
    // Each is laid over those before it.
    let url = ("DATABASE_URL", store("url.db"));
    let variables = [
        ("ONLYONCE_CONFIG", file.display().to_string()),
        ("ONLYONCE_STORE", store("variable.db")),
        ("ONLYONCE_UPSTREAM", upstreams[1].url()),
    ];
    let flags = ["--store".to_owned(), store("flag.db"), "--upstream".to_owned(), upstreams[2].url()];
    for (layers, database, upstream) in
        [(0, "onlyonce.db", 1), (1, "url.db", 1), (2, "file.db", 0), (3, "variable.db", 1), (4, "flag.db", 2)]
    {
        // What cannot be known without it comes from where the layer allows.
        fs::write(&file, if layers >= 2 { says.as_str() } else { ports }).unwrap();
        let mut command = proxy(&[]);
        command.current_dir(folder.path()).env("ONLYONCE_CONFIG", &file);
        if layers < 2 {
            command.env("ONLYONCE_UPSTREAM", upstreams[1].url());
        }
        if layers >= 1 {
            command.env(url.0, &url.1);
        }
        if layers >= 3 {
            command.envs(variables.clone());
        }
        if layers >= 4 {
            command.args(&flags);
        }
        let proxy = Proxy::spawn(command, Arc::clone(&folder)).unwrap();
        assert!(folder.path().join(database).exists(), "{layers} layers: {}", proxy.stderr());
        let before = upstreams[upstream].received();
        post(&format!("layers-{layers}")).send(&proxy);
        assert_eq!(upstreams[upstream].received(), before + 1, "{layers} layers");
    }
}

#[test]
fn logs_can_be_read_by_programs() {
    let upstream = Upstream::start();
    let setup = Setup::new(upstream.url());
    let mut command = proxy(&["--log-format=json", "--config", setup.written().to_str().unwrap()]);
    command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["message"], &line["level"]), (&"listening".into(), &"INFO".into()));
    assert!(line["listen"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
}
