//! The README is true, and a payment is charged and booked once, whatever dies.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::Read;
use std::process::Command;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use onlyonce_testkit::{Curl, Example, Postgres};
use tempfile::TempDir;

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Both programs, and their database.
struct Shop {
    folder: TempDir,
    server: &'static Postgres,
    database: String,
    provider: Example,
    application: Example,
}

impl Shop {
    fn open() -> Self {
        let (folder, server) = (tempfile::tempdir().unwrap(), Postgres::shared());
        let database = server.database();
        let provider = provider(&folder, "127.0.0.1:0");
        let application = application(&server.url(&database), &provider);
        Self { folder, server, database, provider, application }
    }

    fn another_application(&self) -> Example {
        application(&self.server.url(&self.database), &self.provider)
    }

    fn pay(&self, payer: &str, key: &str, payee: &str, amount: u32) -> String {
        self.application.ask(&payment(payer, key, payee, amount))
    }

    fn mood(&self, mood: &str) {
        let curl = Curl::parse(&format!("http://127.0.0.1:3001/mood -X PUT -d {mood}"));
        assert!(self.provider.ask(&curl.request).starts_with("HTTP/1.1 200 "));
    }

    fn charges(&self) -> String {
        let answer = self.provider.ask(&Curl::parse("http://127.0.0.1:3001/charges").request);
        answer.lines().last().unwrap().to_owned()
    }

    fn charged(&self, expected: &str) {
        let asking = Instant::now();
        while self.charges() != expected {
            assert!(asking.elapsed() < PATIENCE, "{}", self.charges());
            sleep(Duration::from_millis(20));
        }
    }

    /// How many payments are booked, and how much the shop has; after a look at the books.
    fn books(&self) -> String {
        let sql = |sql| self.server.sql(&self.database, sql);
        let out_of_balance =
            sql("SELECT payment FROM ledger GROUP BY payment HAVING sum(amount) <> 0 OR count(*) <> 2");
        assert_eq!(out_of_balance, "");
        let wrong =
            sql("SELECT name FROM accounts LEFT JOIN ledger ON account = name GROUP BY name, balance \
            HAVING balance <> (CASE name WHEN 'shop' THEN 0 ELSE 500 END) + coalesce(sum(amount), 0)");
        assert_eq!(wrong, "");
        sql("SELECT (SELECT count(*) FROM payments), (SELECT balance FROM accounts WHERE name = 'shop')")
    }
}

fn provider(folder: &TempDir, address: &str) -> Example {
    let mut command = Command::new(env!("CARGO_BIN_EXE_card-provider"));
    Example::start(command.current_dir(folder.path()).env("LISTEN", address))
}

fn application(database_url: &str, provider: &Example) -> Example {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axum-payments"));
    command.env("LISTEN", "127.0.0.1:0").env("DATABASE_URL", database_url);
    // A proxy of this machine's environment does not lead there.
    command.env("CARD_PROVIDER", format!("http://{}", provider.addr())).env("NO_PROXY", "127.0.0.1");
    Example::start(&mut command)
}

fn payment(payer: &str, key: &str, payee: &str, amount: u32) -> String {
    let arguments = format!(
        "http://127.0.0.1:3000/payments -H 'X-User: {payer}' -H 'Idempotency-Key: {key}' \
         -H 'Content-Type: application/json' -d '{{\"to\": \"{payee}\", \"amount\": {amount}}}'"
    );
    Curl::parse(&arguments).request
}

fn assert_paid(answer: &str, replayed: bool) {
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    assert_eq!(answer.contains("idempotent-replayed: true"), replayed, "{answer}");
}

fn assert_not_confirmed(answer: &str) {
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("retry-after: 1"), "{answer}");
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn does_what_the_readme_says() {
    let shop = Shop::open();
    let curls = Curl::all(include_str!("../README.md"));
    assert!(curls.len() >= 18, "only {} commands were found", curls.len());
    for curl in curls {
        curl.check(if curl.port == 3000 { &shop.application } else { &shop.provider });
    }
    assert_eq!(shop.books(), "2|150");
}

#[test]
fn killed_between_the_charge_and_the_commit_it_charges_once_and_books_once() {
    let mut shop = Shop::open();
    shop.mood("60000");
    let mut first = shop.application.send(&payment("ann", "k", "shop", 100));
    shop.charged("1 charges of 100 in all");
    shop.application.kill();
    let mut answer = String::new();
    let _ = first.read_to_string(&mut answer);
    assert_eq!(answer, "", "it was answered before it was killed");
    assert_eq!(shop.books(), "0|0");

    shop.application = shop.another_application();
    shop.mood("fine");
    // At once: nothing waits for a lease.
    assert_paid(&shop.pay("ann", "k", "shop", 100), false);
    assert_paid(&shop.pay("ann", "k", "shop", 100), true);
    assert_eq!((shop.charges().as_str(), shop.books().as_str()), ("1 charges of 100 in all", "1|100"));
}

#[test]
fn a_provider_that_dies_after_its_charge_is_asked_again_under_the_same_key() {
    let mut shop = Shop::open();
    shop.mood("60000");
    let request = payment("ann", "k", "shop", 100);
    let mut first = shop.application.send(&request);
    shop.charged("1 charges of 100 in all");
    shop.provider.kill();
    let mut answer = String::new();
    first.read_to_string(&mut answer).unwrap();
    assert_not_confirmed(&answer);
    assert_not_confirmed(&shop.application.ask(&request));
    assert_eq!(shop.books(), "0|0");

    shop.provider = provider(&shop.folder, &shop.provider.addr().to_string());
    assert_paid(&shop.application.ask(&request), false);
    assert_eq!((shop.charges().as_str(), shop.books().as_str()), ("1 charges of 100 in all", "1|100"));
}

#[test]
fn a_slow_provider_is_given_up_and_asked_again_under_the_same_key() {
    let shop = Shop::open();
    shop.mood("60000");
    assert_not_confirmed(&shop.pay("ann", "k", "shop", 100));
    assert_eq!(shop.books(), "0|0");
    shop.mood("fine");
    assert_paid(&shop.pay("ann", "k", "shop", 100), false);
    assert_eq!((shop.charges().as_str(), shop.books().as_str()), ("1 charges of 100 in all", "1|100"));
}

#[test]
fn copies_on_two_instances_are_one_payment_and_have_one_answer() {
    let shop = Shop::open();
    shop.mood("500");
    let other = shop.another_application();
    let request = payment("ann", "k", "shop", 100);
    let answers: Vec<String> = scope(|scope| {
        let instances = [&shop.application, &other];
        let asking: Vec<_> = instances
            .iter()
            .cycle()
            .take(16)
            .map(|instance| scope.spawn(|| instance.ask(&request)))
            .collect();
        asking.into_iter().map(|copy| copy.join().unwrap()).collect()
    });
    let replayed = answers.iter().filter(|answer| answer.contains("idempotent-replayed: true")).count();
    assert_eq!(replayed, 15, "{answers:?}");
    for answer in &answers {
        assert!(answer.starts_with("HTTP/1.1 201 ") && body(answer) == body(&answers[0]), "{answers:?}");
    }
    assert_eq!((shop.charges().as_str(), shop.books().as_str()), ("1 charges of 100 in all", "1|100"));
}

#[test]
fn two_who_pay_each_other_are_a_deadlock_and_both_are_booked() {
    let shop = Shop::open();
    // Long enough for both to have locked their own account.
    shop.mood("1500");
    let (ann, bob) = scope(|scope| {
        let ann = scope.spawn(|| shop.pay("ann", "k", "bob", 70));
        let bob = scope.spawn(|| shop.pay("bob", "k", "ann", 30));
        (ann.join().unwrap(), bob.join().unwrap())
    });
    assert_paid(&ann, false);
    assert_paid(&bob, false);
    assert_eq!((shop.charges().as_str(), shop.books().as_str()), ("2 charges of 100 in all", "2|0"));
    // The server counts with a delay.
    let asking = Instant::now();
    let deadlocks = format!("SELECT deadlocks FROM pg_stat_database WHERE datname = '{}'", shop.database);
    while shop.server.sql("postgres", &deadlocks) == "0" {
        assert!(asking.elapsed() < PATIENCE, "there was no deadlock, and nothing was shown");
        sleep(Duration::from_millis(100));
    }
}

#[test]
fn without_a_database_it_says_what_it_needs() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axum-payments"));
    let output = command.env_remove("DATABASE_URL").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("axum-payments: set DATABASE_URL to a Postgres database"), "{said}");
}
