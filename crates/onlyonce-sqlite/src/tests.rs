//! No statement reads more rows than it is about.

use onlyonce_core::store::{Cursor, Filter};
use onlyonce_core::{Id, Timestamp};
use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Execute, Row, SqliteConnection};

use super::*;

async fn database() -> (tempfile::TempDir, SqliteConnection) {
    let folder = tempfile::tempdir().expect("a folder");
    let target = Target::new(&SqliteOptions::file(folder.path().join("keys.db"))).expect("valid");
    let (connection, _) = schema::prepare(&target).await.expect("it opens");
    (folder, connection)
}

/// What SQLite means to do, one step a line.
async fn plan(connection: &mut SqliteConnection, sql: &str, arguments: SqliteArguments) -> String {
    let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
    let steps = sqlx::query_with(explain, arguments).fetch_all(connection).await.expect(sql);
    let step = |step: &sqlx::sqlite::SqliteRow| step.try_get::<String, _>("detail").expect("a step");
    steps.iter().map(step).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn every_write_and_read_finds_its_row_by_the_primary_key() {
    let (_folder, mut connection) = database().await;
    let mut statements: Vec<(String, SqliteArguments)> = [sql::UPDATE, sql::RESTART, sql::DELETE]
        .map(|statement| (statement.to_owned(), SqliteArguments::default()))
        .into();
    for ids in [1, 5, sql::ROWS_MAX] {
        let ids: Vec<Id> = (0..ids).map(|at| Id([at as u8; 32])).collect();
        let (text, arguments) = sql::select(&ids, false).expect("it encodes");
        statements.push((text.to_string(), arguments));
    }
    for (statement, arguments) in statements {
        let plan = plan(&mut connection, &statement, arguments).await;
        assert!(
            plan.contains("USING INDEX sqlite_autoindex_idempotency_keys_1 (id=?)"),
            "{statement}\n{plan}"
        );
        assert!(!plan.contains("SCAN"), "{statement}\n{plan}");
    }
}

#[tokio::test]
async fn a_sweep_goes_by_expiry() {
    let (_folder, mut connection) = database().await;
    let plan = plan(&mut connection, sql::SWEEP, SqliteArguments::default()).await;
    assert!(plan.contains("idempotency_keys_expires_at (expires_at<?)"), "{plan}");
    assert!(plan.contains("USING INTEGER PRIMARY KEY (rowid=?)"), "{plan}");
    assert!(!plan.contains("SCAN") && !plan.contains("TEMP B-TREE FOR ORDER"), "{plan}");
}

#[tokio::test]
async fn a_listing_goes_by_key_or_by_age() {
    let (_folder, mut connection) = database().await;
    let after = Cursor { created_at: Timestamp(1), id: Id([1; 32]) };
    let key = Filter { key: Some("k".to_owned()), ..Filter::default() };
    let id = Filter { id: Some(Id([1; 32])), ..Filter::default() };
    for (filter, after, index) in [
        (&key, None, "SEARCH idempotency_keys USING INDEX idempotency_keys_key (key=?)"),
        (&key, Some(&after), "SEARCH idempotency_keys USING INDEX idempotency_keys_key (key=?)"),
        (&id, None, "SEARCH idempotency_keys USING INDEX sqlite_autoindex_idempotency_keys_1 (id=?)"),
        (&Filter::default(), Some(&after), "SEARCH idempotency_keys USING INDEX idempotency_keys_created_at"),
        // In order from the index, so that a page ends the scan.
        (&Filter::default(), None, "SCAN idempotency_keys USING INDEX idempotency_keys_created_at"),
    ] {
        let mut query = list_query(filter, after, 100);
        let mut query = query.build();
        let arguments = query.take_arguments().expect("they encode").expect("there are some");
        let sql = query.sql().as_str().to_owned();
        let plan = plan(&mut connection, &sql, arguments).await;
        assert!(plan.contains(index), "{sql}\n{plan}");
    }
}

/// A statement that changes no row, or too many, rolls its batch back instead of being believed.
#[tokio::test]
async fn a_lost_row_is_noticed() {
    let (_folder, mut connection) = database().await;
    let rows = [(Id([1; 32]), Revision(1))];
    let error = writer::run(&mut connection, &sql::DELETES, &rows, |to, (id, revision)| {
        sql::bind_id(to, *id)?;
        sql::bind_revision(to, *revision)
    })
    .await
    .expect_err("there is no such row");
    assert!(error.to_string().contains("1 rows were to change under the write lock and 0 did"), "{error}");
}

#[test]
fn texts_are_repeated_in_powers_of_two() {
    for (rows, count) in [(1, 1), (2, 2), (3, 2), (63, 32), (64, 64), (200, 64)] {
        let (text, taken) = sql::DELETES.at_most(rows);
        assert_eq!((text.matches("DELETE").count(), taken), (count, count));
    }
}
