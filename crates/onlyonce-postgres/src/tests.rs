//! No statement reads more rows than it is about, planned on an empty table and run on a million rows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce_core::record::NewState;
use onlyonce_core::store::Filter;
use onlyonce_core::{Fingerprint, Outcome};
use onlyonce_testkit::Postgres;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};

use super::*;

const ROWS: u64 = 1_000_000;

fn operation(key: &str) -> Operation {
    Operation::new("default", "POST /payments", "ann", Key::new(key).expect("a key"))
}

fn running(revision: u128) -> Write {
    Write {
        fingerprint: Fingerprint { target: [1; 32], body: [2; 32] },
        revision: Revision(revision),
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: Duration::from_secs(75) },
        retention: Duration::from_secs(86_400),
    }
}

/// Claims, completes, releases and refuses 64 keys at once and then one, so that every statement is used.
async fn use_it(store: &PostgresStore, round: u128) {
    for keys in [64, 1] {
        let mut calls = tokio::task::JoinSet::new();
        for at in 0..keys {
            let (store, payment) = (store.clone(), operation(&format!("{round}-{keys}-{at}")));
            calls.spawn(async move {
                let first = running(1);
                assert!(matches!(store.insert(&payment, first.clone()).await, Ok(Inserted::New(_))));
                let refused = store.insert(&payment, first.clone()).await;
                assert!(matches!(refused, Ok(Inserted::Exists(_))), "{refused:?}");
                let outcome = Outcome { status: 201, head: "h".into(), body: "b".into() };
                let done = Write { state: NewState::Done(outcome), ..running(2) };
                let replaced = store.replace(payment.id(), first.revision, done).await;
                assert!(matches!(replaced, Ok(Replaced::Written(_))), "{replaced:?}");
                assert!(store.read(payment.id()).await.expect("it reads").is_some());
                let lost = store.replace(payment.id(), first.revision, running(3)).await;
                assert!(matches!(lost, Ok(Replaced::Lost(Some(_)))), "{lost:?}");
                assert!(store.remove(payment.id(), Revision(2)).await.expect("it removes"));
            });
        }
        calls.join_all().await;
    }
    store.sweep(10).await.expect("it sweeps");
}

async fn number(connection: &mut PgConnection, sql: &'static str) -> i64 {
    connection.fetch_one(sql).await.expect(sql).try_get(0).expect(sql)
}

/// Rows that were looked at in the table or an index, by whatever statement.
const LOOKED_AT: &str = "SELECT (sum(idx_tup_read) + (SELECT seq_tup_read FROM pg_stat_user_tables \
    WHERE relname = 'idempotency_keys'))::bigint FROM pg_stat_user_indexes WHERE relname = 'idempotency_keys'";

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_finds_its_rows_by_an_index_at_a_million_rows() {
    // Nothing here is about durability, and a million rows are a lot to write.
    let server = Postgres::start(
        "autovacuum = off\nmax_wal_size = 8GB\nwal_level = minimal\nmax_wal_senders = 0\nfsync = off\n\
         synchronous_commit = off\nfull_page_writes = off\nshared_buffers = 512MB\n",
    );
    let database = server.database();
    let options: PostgresOptions = server.url(&database).parse().expect("valid");
    let options = options.allow_volatile(true);
    let store = PostgresStore::open(&options.clone().pool_size(3)).await.expect("it opens");
    // Every connection plans on the empty table, and keeps its plans.
    use_it(&store, 0).await;
    let target = Arc::new(Target::new(&options));
    let mut planner = target.connect().await.expect("it connects").connection;
    let sql = &target.sql;
    let statements = [
        ("insert", &sql.insert, 16),
        ("replace", &sql.replace, 13),
        ("write_many", &sql.write_many, 29),
        ("remove", &sql.remove, 2),
        ("remove_many", &sql.remove_many, 2),
        ("read", &sql.read, 1),
        ("sweep", &sql.sweep, 1),
    ];
    for (name, text, _) in statements {
        let prepare = format!("PREPARE {name} AS {text}");
        planner.execute(sqlx::raw_sql(AssertSqlSafe(prepare))).await.expect(name);
    }
    fill(&server, &database);
    let mut explained = String::new();
    for (name, _, parameters) in statements {
        let nulls = vec!["NULL"; parameters].join(", ");
        let explain = format!("EXPLAIN (COSTS OFF) EXECUTE {name} ({nulls})");
        let rows = planner.fetch_all(sqlx::raw_sql(AssertSqlSafe(explain))).await.expect(name);
        let lines: Vec<String> = rows.iter().map(|row| row.try_get(0).expect("a line")).collect();
        explained += &format!("{name}\n{}\n", lines.join("\n"));
        check_plan(name, &lines);
    }
    in_a_users_transaction(&server.url(&database), sql).await;
    let before = number(&mut planner, LOOKED_AT).await;
    let started = Instant::now();
    use_it(&store, 1).await;
    let took = started.elapsed();
    // Statistics are written about once a second, and by a connection that ends.
    store.close().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let looked_at = number(&mut planner, LOOKED_AT).await - before;
    assert!(looked_at < 20_000, "{looked_at} rows were looked at\n{explained}");
    assert!(took < Duration::from_secs(5), "{took:?}\n{explained}");
    look_around(&options, &mut planner).await;
}

/// In a user's transaction the planner has its own way. It sees the values, as it does with a statement
/// that is not kept, and the table as large as it is, of which no statistics tell.
async fn in_a_users_transaction(url: &str, sql: &sql::Sql) {
    let mut user = PgConnection::connect(url).await.expect("it connects");
    user.execute("SET plan_cache_mode = force_custom_plan").await.expect("a setting");
    let id = "decode(lpad(to_hex(500000), 64, '0'), 'hex')";
    let write = format!("{id}, {id}, {id}, '\\x00', 1, NULL, NULL, 75000, NULL, NULL, NULL, 86400000");
    for (name, text, values) in [
        ("claim", &sql.claim, format!("{write}, 'default', 'POST /payments', 'ann', 'k'")),
        ("take_over", &sql.take_over, format!("{write}, '\\x00'")),
        ("replace", &sql.replace, format!("{write}, '\\x00'")),
        ("read", &sql.read, format!("ARRAY[{id}]")),
    ] {
        let prepare = format!("PREPARE {name} AS {text}");
        user.execute(sqlx::raw_sql(AssertSqlSafe(prepare))).await.expect(name);
        let explain = format!("EXPLAIN (COSTS OFF) EXECUTE {name} ({values})");
        let rows = user.fetch_all(sqlx::raw_sql(AssertSqlSafe(explain))).await.expect(name);
        let lines: Vec<String> = rows.iter().map(|row| row.try_get(0).expect("a line")).collect();
        check_plan(name, &lines);
    }
}

/// A million keys, of which the oldest hundred thousand have expired.
fn fill(server: &Postgres, database: &str) {
    server.sql(
        database,
        &format!(
            "INSERT INTO onlyonce.idempotency_keys (created_at, granted_at, expires_at, sweep_at, lease_until, \
             attempt, id, revision, fingerprint_target, fingerprint_body, namespace, endpoint, caller, key) \
             SELECT at, at, at, at, at, 1, number, substr(number, 17), number, number, \
             'default', 'POST /payments', 'ann', 'key-' || n \
             FROM (SELECT n, decode(lpad(to_hex(n), 64, '0'), 'hex') AS number, CASE WHEN n <= {ROWS} / 10 \
             THEN n::bigint ELSE (extract(epoch FROM now()) * 1000)::bigint + 86400000 + n END AS at \
             FROM generate_series(1, {ROWS}) AS n) AS numbers"
        ),
    );
}

/// The table is touched through an index, by a condition on it, and in the order of the ids.
fn check_plan(name: &str, lines: &[String]) {
    let plan = lines.join("\n");
    for (at, line) in lines.iter().enumerate() {
        assert!(!line.contains("Seq Scan on idempotency_keys") && !line.contains("Bitmap"), "{name}\n{plan}");
        if line.contains("Scan using idempotency_keys") {
            let condition = lines.get(at + 1).is_some_and(|next| next.contains("Index Cond:"));
            assert!(condition, "{name} reads a whole index\n{plan}");
        }
    }
    assert!(plan.contains("Scan using idempotency_keys"), "{name}\n{plan}");
    assert!(!plan.contains("Merge Join"), "{name}\n{plan}");
}

/// Sweeps and listings, which are few and may take longer, but not in proportion to the table.
async fn look_around(options: &PostgresOptions, planner: &mut PgConnection) {
    let store = PostgresStore::open(options).await.expect("it opens");
    let before = number(planner, LOOKED_AT).await;
    let started = Instant::now();
    assert_eq!(store.sweep(1_000).await.expect("it sweeps"), 1_000);
    let first = store.page(&Filter::default(), None, 100).await.expect("it lists");
    let next = store.page(&Filter::default(), first.next.as_ref(), 100).await.expect("it lists");
    assert_eq!((first.entries.len(), next.entries.len()), (100, 100));
    let wanted = operation("wanted");
    store.insert(&wanted, running(1)).await.expect("it inserts");
    let by_key = Filter { key: Some("wanted".to_owned()), ..Filter::default() };
    assert_eq!(store.list(&by_key, 100).await.expect("it lists").len(), 1);
    let took = started.elapsed();
    store.close().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let looked_at = number(planner, LOOKED_AT).await - before;
    assert!(looked_at < 20_000 && took < Duration::from_secs(5), "{looked_at} rows in {took:?}");
}
