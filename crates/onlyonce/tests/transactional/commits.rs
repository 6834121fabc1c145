//! What an execution costs the database in each form.

use onlyonce::OnlyonceLayer;
use onlyonce_testkit::Postgres;
use sqlx::postgres::{PgPool, PgPoolOptions};
use tower::{Layer, ServiceExt};

use super::shop::*;

/// A service that pays one key.
type Pay = Box<dyn Fn(String) -> futures_util::future::BoxFuture<'static, ()> + Send + Sync>;

async fn forms(server: &Postgres) -> (PgPool, [(&'static str, Pay); 2]) {
    let database = server.database();
    server.sql(&database, "CREATE TABLE notes (line text)");
    let shop = OnPostgres::reach(server.url(&database));
    let transactions = shop.instance(16).await;
    let pool = PgPoolOptions::new().max_connections(16).connect(&shop.url).await.unwrap();
    let layer = OnlyonceLayer::new(onlyonce_core::Transactional::store(&transactions), config()).unwrap();
    let transactional = Counter::new(transactions, config(), sell::<OnPostgres>);
    let notes = pool.clone();
    let layered = layer.layer(tower::service_fn(move |request: Asked| {
        let notes = notes.clone();
        async move {
            let insert = sqlx::query("INSERT INTO notes VALUES ($1)").bind(key_of(&request));
            insert.execute(&notes).await.unwrap();
            Ok::<_, std::convert::Infallible>(answer(201, "noted"))
        }
    }));
    let by_layer: Pay = Box::new(move |key| {
        let service = layered.clone();
        Box::pin(async move {
            assert_eq!(service.oneshot(payment(&key, "100")).await.unwrap().status().as_u16(), 201);
        })
    });
    let in_one: Pay = Box::new(move |key| {
        let counter = transactional.clone();
        Box::pin(async move { assert_eq!(counter.pay(&key).await.status.as_u16(), 201) })
    });
    (pool, [("layer", by_layer), ("transactional", in_one)])
}

/// Counted by the database: every transaction that writes takes an id, and each of these commits.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_is_one_commit_where_the_layer_adds_two() {
    // Its ids are counted for all databases of a server, so it has one of its own.
    let server = Postgres::start("");
    let (pool, forms) = forms(&server).await;
    let next_id = || async {
        let id: i64 = sqlx::query_scalar("SELECT txid_snapshot_xmax(txid_current_snapshot())")
            .fetch_one(&pool)
            .await
            .unwrap();
        id
    };
    let mut commits = Vec::new();
    for (name, pay) in &forms {
        let before = next_id().await;
        for execution in 0..20 {
            pay(format!("{name}-{execution}")).await;
        }
        commits.push(next_id().await - before);
    }
    // The layer's claim and outcome, and the handler's own write between them.
    assert_eq!(commits, [3 * 20, 20]);
}
