//! A shop that notes what it sold, on a real database.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use onlyonce::settings::OnConcurrent;
use onlyonce::{Config, RequestBody, ResponseBody, Settings, TransactionalLayer, Tx};
use onlyonce_core::Transactional;
use onlyonce_postgres::{PostgresOptions, PostgresStore, PostgresTransactions};
use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use onlyonce_testkit::Postgres;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt};

/// How many connections a shop has.
pub(crate) const POOL_SIZE: u32 = 8;

/// A database with a table `notes`, and how to reach it.
#[async_trait]
pub(crate) trait Shop: Sized + Send + Sync + 'static {
    type Store: Transactional + Clone;

    async fn open() -> Self;
    /// One instance with its own pool.
    async fn instance(&self, pool_size: u32) -> Self::Store;
    async fn note(tx: &mut Tx<Self::Store>, line: &str);
    /// A statement that fails.
    async fn fail(tx: &mut Tx<Self::Store>);
    async fn notes(&self) -> Vec<String>;
}

pub(crate) struct OnPostgres {
    pub(crate) url: String,
    pool: PgPool,
}

impl OnPostgres {
    pub(crate) fn reach(url: String) -> Self {
        let pool = PgPoolOptions::new().max_connections(2).connect_lazy(&url).unwrap();
        Self { url, pool }
    }

    pub(crate) async fn with_options(
        &self,
        options: PgConnectOptions,
        pool_size: u32,
    ) -> PostgresTransactions {
        let store = PostgresStore::open(&self.url.parse::<PostgresOptions>().unwrap()).await.unwrap();
        let pool = PgPoolOptions::new().max_connections(pool_size).connect_lazy_with(options);
        store.transactions(&pool).await.unwrap()
    }
}

#[async_trait]
impl Shop for OnPostgres {
    type Store = PostgresTransactions;

    async fn open() -> Self {
        let server = Postgres::shared();
        let url = server.url(&server.database());
        let shop = Self::reach(url);
        sqlx::query("CREATE TABLE notes (line text)").execute(&shop.pool).await.unwrap();
        shop
    }

    async fn instance(&self, pool_size: u32) -> PostgresTransactions {
        self.with_options(self.url.parse().unwrap(), pool_size).await
    }

    async fn note(tx: &mut Tx<PostgresTransactions>, line: &str) {
        sqlx::query("INSERT INTO notes VALUES ($1)").bind(line.to_owned()).execute(&mut ***tx).await.unwrap();
    }

    async fn fail(tx: &mut Tx<PostgresTransactions>) {
        sqlx::query("SELECT * FROM nowhere").execute(&mut ***tx).await.expect_err("there is no such table");
    }

    async fn notes(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT line FROM notes ORDER BY line").fetch_all(&self.pool).await.unwrap()
    }
}

pub(crate) struct OnSqlite {
    folder: tempfile::TempDir,
    pool: SqlitePool,
}

impl OnSqlite {
    fn pool(folder: &tempfile::TempDir, size: u32) -> SqlitePool {
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("shop.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full);
        SqlitePoolOptions::new().max_connections(size).connect_lazy_with(options)
    }
}

#[async_trait]
impl Shop for OnSqlite {
    type Store = SqliteTransactions;

    async fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let pool = Self::pool(&folder, 2);
        sqlx::query("CREATE TABLE notes (line TEXT)").execute(&pool).await.unwrap();
        Self { folder, pool }
    }

    async fn instance(&self, pool_size: u32) -> SqliteTransactions {
        let options = SqliteOptions::file(self.folder.path().join("shop.db")).shared(true);
        let store = SqliteStore::open(&options).await.unwrap();
        store.transactions(&Self::pool(&self.folder, pool_size)).await.unwrap()
    }

    async fn note(tx: &mut Tx<SqliteTransactions>, line: &str) {
        sqlx::query("INSERT INTO notes VALUES (?)").bind(line.to_owned()).execute(&mut ***tx).await.unwrap();
    }

    async fn fail(tx: &mut Tx<SqliteTransactions>) {
        sqlx::query("SELECT * FROM nowhere").execute(&mut ***tx).await.expect_err("there is no such table");
    }

    async fn notes(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT line FROM notes ORDER BY line").fetch_all(&self.pool).await.unwrap()
    }
}

type TestBody = Full<Bytes>;
pub(crate) type Asked = Request<RequestBody<TestBody>>;

/// A guarded handler.
#[derive(Clone)]
pub(crate) struct Counter {
    service: BoxCloneSyncService<Request<TestBody>, Answer, Infallible>,
    pub(crate) runs: Arc<AtomicUsize>,
}

/// An answer, read whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) replayed: bool,
    pub(crate) refused: Option<String>,
    pub(crate) retry_after: bool,
    pub(crate) body: String,
}

/// Copies wait.
pub(crate) fn config() -> Config {
    let defaults = Settings { on_concurrent: OnConcurrent::Wait, ..Settings::default() };
    Config { defaults, ..Config::default() }
}

pub(crate) fn waiting(wait: Duration) -> Config {
    let defaults = Settings { on_concurrent: OnConcurrent::Wait, wait, ..Settings::default() };
    Config { defaults, ..Config::default() }
}

impl Counter {
    pub(crate) fn new<T, H>(store: T, config: Config, handler: H) -> Self
    where
        T: Transactional + Clone,
        H: Fn(Asked, usize) -> BoxFuture<'static, Response<TestBody>> + Clone + Send + Sync + 'static,
    {
        Self::behind(&TransactionalLayer::new(store, config).unwrap(), handler)
    }

    pub(crate) fn behind<T, H>(layer: &TransactionalLayer<T>, handler: H) -> Self
    where
        T: Transactional + Clone,
        H: Fn(Asked, usize) -> BoxFuture<'static, Response<TestBody>> + Clone + Send + Sync + 'static,
    {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let inner = tower::service_fn(move |request: Asked| {
            let run = counted.fetch_add(1, Ordering::SeqCst) + 1;
            let answering = handler(request, run);
            async move { Ok::<_, Infallible>(answering.await) }
        });
        let service = layer.layer(inner).and_then(|response: Response<ResponseBody<TestBody>>| async move {
            let (head, body) = response.into_parts();
            let header = |name: &str| head.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
            let body =
                body.collect().await.map_or_else(|error| error.to_string().into(), |body| body.to_bytes());
            Ok(Answer {
                status: head.status,
                replayed: header("idempotent-replayed").is_some(),
                refused: header("onlyonce-refused"),
                retry_after: header("retry-after").is_some(),
                body: String::from_utf8_lossy(&body).into_owned(),
            })
        });
        Self { service: BoxCloneSyncService::new(service), runs }
    }

    pub(crate) async fn send(&self, request: Request<TestBody>) -> Answer {
        let Ok(answer) = self.service.clone().oneshot(request).await;
        answer
    }

    pub(crate) async fn pay(&self, key: &str) -> Answer {
        self.send(payment(key, "100")).await
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

pub(crate) fn payment(key: &str, amount: &str) -> Request<TestBody> {
    Request::post("/payments").header("idempotency-key", key).body(Full::from(amount.to_owned())).unwrap()
}

pub(crate) fn answer(status: u16, body: impl Into<Bytes>) -> Response<TestBody> {
    Response::builder().status(status).body(Full::new(body.into())).unwrap()
}

/// Notes the key and answers 201 with the number of the run.
pub(crate) fn sell<S: Shop>(request: Asked, run: usize) -> BoxFuture<'static, Response<TestBody>> {
    Box::pin(async move {
        let key = key_of(&request);
        let mut tx = Tx::<S::Store>::take(request.extensions()).unwrap();
        S::note(&mut tx, &key).await;
        answer(201, format!("run {run}"))
    })
}

pub(crate) fn key_of(request: &Asked) -> String {
    request.headers().get("idempotency-key").map_or("none", |key| key.to_str().unwrap()).to_owned()
}
