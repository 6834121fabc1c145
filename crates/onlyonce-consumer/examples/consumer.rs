//! Consumes a queue of RabbitMQ or NATS JetStream, and writes a row for each message in the transaction in which the
//! message is recorded as done. The tests kill it.
//!
//! ```text
//! BROKER=amqp://localhost QUEUE=orders DATABASE_URL=postgres://… cargo run --example consumer
//! BROKER=nats://localhost:4222 QUEUE=ORDERS DATABASE_URL=postgres://… cargo run --example consumer
//! ```
//!
//! In the database there must be `CREATE TABLE effects (message text, attempt int, worker int)`.

use std::env;
use std::time::Duration;

use onlyonce_consumer::nats::Nats;
use onlyonce_consumer::rabbitmq::RabbitMq;
use onlyonce_consumer::{Broker, Consumer, Delivered, Handler, InboxConfig, NotDone, Settings};
use onlyonce_postgres::{PostgresOptions, PostgresStore, PostgresTransactions};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let (url, queue) = (env::var("BROKER")?, env::var("QUEUE")?);
    let database = env::var("DATABASE_URL")?;
    let options: PostgresOptions = database.parse()?;
    let store = PostgresStore::open(&options).await?;
    let pool: PgPool = PgPoolOptions::new().max_connections(16).connect(&database).await?;
    let store = store.transactions(&pool).await?;
    if url.starts_with("nats") {
        let dead = env::var("DEAD").unwrap_or_else(|_| "dead.orders".to_owned());
        let orders = Nats::new(&url, &queue, "orders")?.dead_letters(&dead);
        consume(orders.ack_wait(Duration::from_secs(3)), store).await
    } else {
        consume(RabbitMq::new(&url, &queue)?, store).await
    }
}

async fn consume(broker: impl Broker, store: PostgresTransactions) -> Result<(), Error> {
    let settings = Settings {
        // Short, so that whoever watches does not have to wait: a message whose worker was killed is held for so long.
        inbox: InboxConfig { lease: Duration::from_secs(2), ..InboxConfig::default() },
        attempts_max: env::var("ATTEMPTS_MAX").map_or(Ok(10), |max| max.parse())?,
        retry_first: Duration::from_millis(200),
        retry_ceiling: Duration::from_secs(2),
        ..Settings::default()
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        terminate.recv().await;
    };
    Consumer::new(broker, store, "orders", settings)?.run(stop, Orders).await?;
    Ok(())
}

struct Orders;

impl Handler<PostgresTransactions> for Orders {
    type Output = ();

    async fn handle(
        &self,
        transaction: &mut sqlx::Transaction<'static, sqlx::Postgres>,
        message: &Delivered,
    ) -> Result<(), NotDone> {
        let attempt = i32::try_from(message.attempt())?;
        let worker = i32::try_from(std::process::id())?;
        let effect = sqlx::query("INSERT INTO effects VALUES ($1, $2, $3)");
        effect.bind(message.id()).bind(attempt).bind(worker).execute(&mut **transaction).await?;
        match message.payload() {
            b"poison" => std::process::abort(),
            b"flaky" if attempt == 1 => {
                return Err(NotDone::retry_later(std::io::Error::other("the bank is closed")));
            }
            _ => sleep(Duration::from_millis(20)).await,
        }
        Ok(())
    }
}
