//! What is opened, and what is refused with which reason.

use onlyonce_core::store::Filter;
use onlyonce_core::{Inspect, Store};
use onlyonce_postgres::{
    OpenErrorKind, PgBouncer, PostgresOptions, PostgresStore, SCHEMA_VERSION, migrate, migration_sql,
    schema_version,
};
use tokio::task::JoinSet;

use super::*;

async fn refused(options: &PostgresOptions, says: &[&str]) {
    let error = PostgresStore::open(options).await.err().expect("refused");
    assert_eq!(error.kind(), OpenErrorKind::Refused, "{error}");
    let text = error.to_string();
    assert!(says.iter().all(|says| text.contains(says)), "{text}");
    assert!(!text.contains('\n') && !text.contains("hunter2"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_instances_start_at_once_on_an_empty_database() {
    let url = server().url(&server().database());
    let mut opening = JoinSet::new();
    for at in 0..10 {
        let url = url.clone();
        opening.spawn(async move {
            let store = open(&url).await;
            store.insert(&operation(&format!("k{at}")), running()).await.unwrap();
            store.close().await;
        });
    }
    opening.join_all().await;
    assert_eq!(open(&url).await.list(&Filter::default(), 100).await.unwrap().len(), 10);
    assert_eq!(schema_version(&options(&url)).await.unwrap(), Some(SCHEMA_VERSION));
}

#[tokio::test]
async fn an_older_program_refuses_a_newer_schema_unless_it_is_compatible() {
    let database = server().database();
    let options = options(&server().url(&database));
    assert_eq!(schema_version(&options).await.unwrap(), None);
    let migrated = migrate(&options).await.unwrap();
    assert_eq!((migrated.from, migrated.to), (0, SCHEMA_VERSION));
    let next = SCHEMA_VERSION + 1;
    let sql = format!("INSERT INTO onlyonce.schema_versions VALUES ({next}, {SCHEMA_VERSION})");
    server().sql(&database, &sql);
    let store = PostgresStore::open(&options).await.expect("a rolling deploy is under way");
    store.insert(&operation("k"), running()).await.unwrap();
    server().sql(&database, &format!("INSERT INTO onlyonce.schema_versions VALUES ({}, {next})", next + 1));
    refused(&options, &["schema version 3", "knows up to 1", "newer onlyonce"]).await;
}

#[tokio::test]
async fn a_table_in_which_the_guarantee_would_not_hold_is_refused() {
    for (sql, says) in [
        ("ALTER TABLE onlyonce.idempotency_keys DROP CONSTRAINT idempotency_keys_pkey", "unique index"),
        ("ALTER TABLE onlyonce.idempotency_keys SET UNLOGGED", "unlogged"),
        ("ALTER TABLE onlyonce.idempotency_keys DROP COLUMN head", "columns are missing"),
        ("DROP TABLE onlyonce.idempotency_keys", "is gone"),
    ] {
        let database = server().database();
        let options = options(&server().url(&database));
        migrate(&options).await.unwrap();
        server().sql(&database, sql);
        refused(&options, &[says]).await;
        if says == "unlogged" {
            PostgresStore::open(&options.allow_volatile(true)).await.expect("it is allowed");
        }
    }
}

#[tokio::test]
async fn settings_that_lose_acknowledged_writes_are_refused() {
    let database = server().database();
    let options = || options(&server().url(&database));
    let store = PostgresStore::open(&options()).await.unwrap();
    server().sql(&database, &format!("ALTER DATABASE {database} SET synchronous_commit = off"));
    refused(&options(), &["volatile", "synchronous_commit", "allow_volatile"]).await;
    // A connection that is opened later is checked too.
    let kill = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}' \
         AND application_name = 'onlyonce'"
    );
    server().sql("postgres", &kill);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let error = store.insert(&operation("k"), running()).await.unwrap_err();
    assert!(!error.may_have_applied() && error.to_string().contains("volatile"), "{error}");
    PostgresStore::open(&options().allow_volatile(true)).await.expect("it is allowed");
    let url = format!("{}?options=-c%20synchronous_commit%3Don", server().url(&database));
    PostgresStore::open(&super::options(&url)).await.expect("the URL sets it");
}

/// A user with this password and these privileges, and the URL of the database for it.
fn user(database: &str, password: &str, grants: &str) -> String {
    let name = format!("u_{database}");
    let sql = format!("CREATE ROLE {name} LOGIN PASSWORD '{password}'; {}", grants.replace("USER", &name));
    server().sql(database, &sql);
    let password: String = password.bytes().map(|byte| format!("%{byte:02X}")).collect();
    format!("postgres://{name}:{password}@127.0.0.1:{}/{database}", server().port())
}

#[tokio::test]
async fn a_user_without_ddl_privileges_opens_a_schema_that_others_migrate() {
    let database = server().database();
    let root = options(&server().url(&database));
    let url = user(&database, "s:/?#[]@!&%+ \"\\ü", "");
    refused(&options(&url), &["lacks privileges", "migrate --print"]).await;
    server().sql(&database, &migration_sql(&root, 0));
    assert_eq!(migration_sql(&root, SCHEMA_VERSION), "");
    refused(&options(&url), &["onlyonce"]).await;
    server().sql(&database, &format!("GRANT USAGE ON SCHEMA onlyonce TO u_{database}"));
    let rest = format!("GRANT SELECT ON onlyonce.schema_versions TO u_{database}");
    server().sql(&database, &rest);
    refused(&options(&url), &["GRANT USAGE ON SCHEMA", "DELETE"]).await;
    let grant = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA onlyonce TO";
    server().sql(&database, &format!("{grant} u_{database}"));
    let store = open(&url).await;
    store.insert(&operation("k"), running()).await.unwrap();
    assert_eq!(store.sweep(10).await.unwrap(), 0);
    assert_eq!(store.list(&Filter::default(), 10).await.unwrap().len(), 1);
    assert!(!store.facts().await.unwrap().may_migrate);
}

#[tokio::test]
async fn a_wrong_place_is_told_from_one_that_is_away() {
    let database = server().database();
    user(&database, "right", "");
    let wrong = format!("postgres://u_{database}:hunter2@127.0.0.1:{}/{database}", server().port());
    refused(&options(&wrong), &["user and password"]).await;
    refused(&options(&server().url("no_such_database")), &["create the database"]).await;
    let away = options("postgres://ann:hunter2@127.0.0.1:1/keys?connect_timeout=1");
    let error = PostgresStore::open(&away).await.err().expect("nobody is there");
    assert_eq!(error.kind(), OpenErrorKind::Failed, "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[tokio::test]
async fn the_search_path_is_neither_used_nor_changed() {
    let database = server().database();
    server().sql(
        &database,
        &format!(
            "CREATE SCHEMA decoy; CREATE TABLE decoy.idempotency_keys (id int); CREATE TABLE decoy.schema_versions (v int); \
             CREATE FUNCTION decoy.floor(numeric) RETURNS numeric LANGUAGE sql AS 'SELECT 0::numeric'; \
             ALTER DATABASE {database} SET search_path = decoy"
        ),
    );
    let store = open(&server().url(&database)).await;
    store.insert(&operation("k"), running()).await.unwrap();
    assert_eq!(server().sql(&database, "SELECT count(*) FROM onlyonce.idempotency_keys"), "1");
    assert_eq!(server().sql(&database, "SELECT count(*) FROM decoy.idempotency_keys"), "0");
    assert_eq!(server().sql(&database, "SHOW search_path"), "decoy");
}

#[tokio::test]
async fn facts_are_those_of_the_server() {
    let store = open(&server().url(&server().database())).await;
    let facts = store.facts().await.unwrap();
    assert_eq!((facts.schema_version, facts.pool_size, facts.pooled), (SCHEMA_VERSION, 5, false));
    assert!(facts.fsync && facts.full_page_writes && facts.may_migrate && !facts.in_recovery);
    assert_eq!((facts.synchronous_commit.as_str(), facts.synchronous_standby_names.as_str()), ("on", ""));
    assert!(facts.on_failover().contains("not replicated yet"), "{}", facts.on_failover());
    assert!(facts.clock_ahead_ms.abs() < 2_000 && facts.connections_max >= 20, "{facts:?}");
    let forced = options(&server().url(&server().database())).pgbouncer(PgBouncer::Yes);
    assert!(PostgresStore::open(&forced).await.unwrap().facts().await.unwrap().pooled);
}

#[tokio::test]
async fn a_closed_store_lets_its_connections_go_and_refuses() {
    let database = server().database();
    let store = open(&server().url(&database)).await;
    store.insert(&operation("k"), running()).await.unwrap();
    store.read(operation("k").id()).await.unwrap();
    store.close().await;
    store.close().await;
    let error = store.insert(&operation("k2"), running()).await.unwrap_err();
    assert!(!error.may_have_applied() && error.to_string().contains("closed"), "{error}");
    let left = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}'");
    for _ in 0..100 {
        if server().sql("postgres", &left) == "0" {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} connections are left", server().sql("postgres", &left));
}

#[tokio::test]
async fn a_server_is_trusted_as_far_as_sslmode_says() {
    let (server, certificate) = Postgres::start_with_tls();
    let root = format!("sslrootcert={}", certificate.display());
    for (host, parameters, opens) in [
        ("127.0.0.1", "sslmode=disable", Some("f")),
        ("127.0.0.1", "sslmode=prefer", Some("t")),
        ("127.0.0.1", "sslmode=require", Some("t")),
        ("127.0.0.1", "sslmode=verify-ca", None),
        ("127.0.0.1", &format!("sslmode=verify-ca&{root}"), Some("t")),
        ("127.0.0.1", &format!("sslmode=verify-full&{root}"), None),
        ("localhost", &format!("sslmode=verify-full&{root}"), Some("t")),
    ] {
        let url = format!(
            "postgres://postgres@{host}:{}/postgres?{parameters}&application_name=tls-test",
            server.port()
        );
        let opened = PostgresStore::open(&options(&url)).await;
        match (opened, opens) {
            (Ok(store), Some(encrypted)) => {
                let found = server.sql(
                    "postgres",
                    "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                     WHERE application_name = 'tls-test'",
                );
                assert_eq!(found, encrypted, "{parameters}");
                store.close().await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            (Err(error), None) => assert!(!error.to_string().contains('\n'), "{error}"),
            (Ok(_), None) => panic!("{host} {parameters}: opened"),
            (Err(error), Some(_)) => panic!("{host} {parameters}: {error}"),
        }
    }
}
