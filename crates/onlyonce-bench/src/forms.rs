//! The same execution in the layer (claim, the handler's own write, outcome) and in one transaction.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::Full;
use onlyonce::{OnlyonceLayer, RequestBody, TransactionalLayer, Tx};
use onlyonce_postgres::{PostgresOptions, PostgresStore, PostgresTransactions};
use onlyonce_testkit::Postgres;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Layer, ServiceExt};

use crate::TURN;
use crate::stats::percentile;

const ROUNDS: usize = 5;

/// Pays one key; whether it was paid.
type Pay = Box<dyn Fn(String) -> BoxFuture<'static, bool> + Send + Sync>;

type Asked = Request<RequestBody<Full<Bytes>>>;

pub(crate) async fn measure() {
    let server = Postgres::start("");
    let forms = Arc::new(forms(&server).await);
    for concurrent in [1, 16, 64] {
        let mut rates = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            for (form, rates) in rates.iter_mut().enumerate() {
                rates.push(rate(&forms, form, concurrent, round).await);
            }
        }
        let [layer, transactional] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            percentile(&rates, 50)
        });
        println!(
            "{concurrent} concurrent: layer {layer:.0}/s, transactional {transactional:.0}/s, ratio {:.2}",
            transactional / layer
        );
    }
}

/// Executions per second of one form, for one turn.
async fn rate(forms: &Arc<[Pay; 2]>, form: usize, concurrent: usize, round: usize) -> f64 {
    let (started, mut paying) = (Instant::now(), JoinSet::new());
    for payer in 0..concurrent {
        let forms = Arc::clone(forms);
        paying.spawn(async move {
            let mut done = 0_u32;
            while started.elapsed() < TURN {
                assert!(forms[form](format!("{form}-{concurrent}-{round}-{payer}-{done}")).await, "not paid");
                done += 1;
            }
            done
        });
    }
    let done: u32 = paying.join_all().await.into_iter().sum();
    f64::from(done) / started.elapsed().as_secs_f64()
}

async fn forms(server: &Postgres) -> [Pay; 2] {
    let database = server.database();
    server.sql(&database, "CREATE TABLE notes (line text)");
    let url = server.url(&database);
    let options: PostgresOptions = url.parse().expect("the testkit's URL");
    let store = PostgresStore::open(&options).await.expect("a private server");
    let pool = PgPoolOptions::new().max_connections(16).connect(&url).await.expect("a private server");
    let transactions = store.transactions(&pool).await.expect("the same server");

    let layer = OnlyonceLayer::builder(store).build().expect("the defaults");
    let layered = layer.layer(tower::service_fn(move |request: Asked| {
        let pool = pool.clone();
        async move {
            let insert = sqlx::query("INSERT INTO notes VALUES ($1)").bind(key_of(&request)).execute(&pool);
            Ok::<_, Infallible>(answer(insert.await.is_ok()))
        }
    }));
    let layer = TransactionalLayer::builder(transactions).build().expect("the defaults");
    let in_one = layer.layer(tower::service_fn(|request: Asked| async move {
        let Ok(mut tx) = Tx::<PostgresTransactions>::take(request.extensions()) else {
            return Ok::<_, Infallible>(answer(false));
        };
        let insert = sqlx::query("INSERT INTO notes VALUES ($1)").bind(key_of(&request)).execute(&mut **tx);
        Ok(answer(insert.await.is_ok()))
    }));
    [
        Box::new(move |key| {
            let answering = layered.clone().oneshot(payment(&key));
            Box::pin(async move { answering.await.is_ok_and(|answer| answer.status().is_success()) })
        }),
        Box::new(move |key| {
            let answering = in_one.clone().oneshot(payment(&key));
            Box::pin(async move { answering.await.is_ok_and(|answer| answer.status().is_success()) })
        }),
    ]
}

fn key_of(request: &Asked) -> String {
    let key = request.headers().get("idempotency-key").and_then(|key| key.to_str().ok());
    key.unwrap_or_default().to_owned()
}

fn payment(key: &str) -> Request<Full<Bytes>> {
    let request = Request::post("/payments").header("idempotency-key", key);
    request.body(Full::from("100")).expect("a valid request")
}

fn answer(paid: bool) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::from("paid"));
    *answer.status_mut() =
        if paid { http::StatusCode::CREATED } else { http::StatusCode::INTERNAL_SERVER_ERROR };
    answer
}
