//! A bank's teller that can be killed at any moment: a payment is two rows, one on each side.
//!
//! `teller STORE [--die-at-call N | --die-at-pause N]`
//!
//! `STORE` is the URL of a Postgres database or the path of a SQLite file, with a table
//! `entries (account text, amount text)`. The program kills itself as `kill -9` does: before and after each
//! call of the store (the first is 1), or at the handler's N-th pause. It prints where it listens.

use std::future::poll_fn;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::routing::post;
use onlyonce::{TransactionalLayer, Tx};
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Id, Operation, Revision, Store, TransactionError, Transactional, Write};
use onlyonce_postgres::{PostgresOptions, PostgresStore, PostgresTransactions};
use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse::<usize>().ok()
    };
    let die_at_pause = number("--die-at-pause").unwrap_or(usize::MAX);
    let steps = Steps { done: Arc::default(), die_at: number("--die-at-call").unwrap_or(usize::MAX) };
    let place = arguments.first().ok_or("which store?")?;
    if place.starts_with("postgres://") {
        let store = PostgresStore::open(&place.parse::<PostgresOptions>()?).await?;
        let pool = PgPoolOptions::new().max_connections(4).connect(place).await?;
        serve(Mortal { store: store.transactions(&pool).await?, steps }, die_at_pause).await
    } else {
        let store = SqliteStore::open(&SqliteOptions::file(place).shared(true)).await?;
        let pool = SqlitePoolOptions::new().connect_with(SqliteConnectOptions::new().filename(place)).await?;
        serve(Mortal { store: store.transactions(&pool).await?, steps }, die_at_pause).await
    }
}

async fn serve<T: Teller>(store: Mortal<T>, die_at_pause: usize) -> Outcome<()> {
    let layer = TransactionalLayer::builder(store).build()?;
    let pay = move |tx: Tx<Mortal<T>>| dying_at(die_at_pause, pay(tx));
    let app = Router::new().route("/payments", post(pay)).layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

async fn pay<T: Teller>(mut tx: Tx<Mortal<T>>) -> String {
    T::enter(&mut tx, "payer", "-100").await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    T::enter(&mut tx, "payee", "+100").await;
    format!("paid by process {}", std::process::id())
}

/// Dies where the work pauses for the N-th time.
async fn dying_at<V>(pause: usize, work: impl Future<Output = V>) -> V {
    let mut work = pin!(work);
    let mut pauses = 0;
    poll_fn(|context| {
        let polled = work.as_mut().poll(context);
        if polled.is_pending() {
            pauses += 1;
            if pauses == pause {
                die();
            }
        }
        polled
    })
    .await
}

fn die() -> ! {
    let _ = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    loop {
        std::thread::park();
    }
}

/// How an entry is written, in each database.
#[async_trait]
trait Teller: Transactional + Clone {
    async fn enter(transaction: &mut Self::Transaction, account: &str, amount: &str);
}

#[async_trait]
impl Teller for PostgresTransactions {
    async fn enter(transaction: &mut Self::Transaction, account: &str, amount: &str) {
        let entry = sqlx::query("INSERT INTO entries VALUES ($1, $2)").bind(account).bind(amount);
        entry.execute(&mut **transaction).await.expect("it is written");
    }
}

#[async_trait]
impl Teller for SqliteTransactions {
    async fn enter(transaction: &mut Self::Transaction, account: &str, amount: &str) {
        let entry = sqlx::query("INSERT INTO entries VALUES (?, ?)").bind(account).bind(amount);
        entry.execute(&mut **transaction).await.expect("it is written");
    }
}

/// A store whose process dies at one of its calls.
#[derive(Clone)]
struct Mortal<T> {
    store: T,
    steps: Steps,
}

#[derive(Clone)]
struct Steps {
    done: Arc<AtomicUsize>,
    die_at: usize,
}

impl Steps {
    /// Once before each call and once after it.
    async fn around<V>(&self, call: impl Future<Output = V>) -> V {
        self.step();
        let answer = call.await;
        self.step();
        answer
    }

    fn step(&self) {
        if self.done.fetch_add(1, Ordering::SeqCst) + 1 == self.die_at {
            die();
        }
    }
}

#[async_trait]
impl<T: Teller> Transactional for Mortal<T> {
    type Transaction = T::Transaction;

    const ONE_WRITER: bool = T::ONE_WRITER;

    fn store(&self) -> Arc<dyn Store> {
        self.store.store()
    }

    async fn begin(&self, wait: Duration) -> Result<Self::Transaction, TransactionError> {
        self.steps.around(self.store.begin(wait)).await
    }

    async fn open(&self) -> Result<Self::Transaction, TransactionError> {
        self.steps.around(self.store.open()).await
    }

    async fn insert(
        &self,
        transaction: &mut Self::Transaction,
        operation: &Operation,
        write: Write,
    ) -> Result<Inserted, TransactionError> {
        self.steps.around(self.store.insert(transaction, operation, write)).await
    }

    async fn replace(
        &self,
        transaction: &mut Self::Transaction,
        id: Id,
        expected: Revision,
        write: Write,
    ) -> Result<Replaced, TransactionError> {
        self.steps.around(self.store.replace(transaction, id, expected, write)).await
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<(), TransactionError> {
        self.steps.around(self.store.commit(transaction)).await
    }

    async fn roll_back(&self, transaction: Self::Transaction) {
        self.steps.around(self.store.roll_back(transaction)).await;
    }
}
