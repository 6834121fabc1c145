//! No statement reads more rows than it is about.

use onlyonce_core::store::{Cursor, Filter};
use onlyonce_core::{Id, Timestamp};
use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Execute, Row, SqliteConnection};

use super::*;

async fn database(shared: bool) -> (tempfile::TempDir, SqliteConnection, &'static Statements) {
    let folder = tempfile::tempdir().expect("a folder");
    let options = SqliteOptions::file(folder.path().join("keys.db")).shared(shared);
    let target = Target::new(&options).expect("valid");
    let (connection, _) = schema::prepare(&target).await.expect("it opens");
    (folder, connection, target.sql())
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
    for shared in [false, true] {
        let (_folder, mut connection, sql) = database(shared).await;
        let mut statements: Vec<(String, SqliteArguments)> = [&sql.update, &sql.restart, &sql.delete]
            .map(|statement| (statement.clone(), SqliteArguments::default()))
            .into();
        for ids in [1, 5, sql::ROWS_MAX] {
            let ids: Vec<Id> = (0..ids).map(|at| Id([at as u8; 32])).collect();
            let (text, arguments) = sql.select(&ids, false).expect("it encodes");
            statements.push((text.to_string(), arguments));
        }
        let index = format!("USING INDEX sqlite_autoindex_{}_1 (id=?)", sql.table);
        for (statement, arguments) in statements {
            let plan = plan(&mut connection, &statement, arguments).await;
            assert!(plan.contains(&index), "{statement}\n{plan}");
            assert!(!plan.contains("SCAN"), "{statement}\n{plan}");
        }
    }
}

#[tokio::test]
async fn a_sweep_goes_by_expiry() {
    for shared in [false, true] {
        let (_folder, mut connection, sql) = database(shared).await;
        let plan = plan(&mut connection, &sql.sweep, SqliteArguments::default()).await;
        assert!(plan.contains("idempotency_keys_sweep_at (sweep_at<?)"), "{plan}");
        assert!(plan.contains("USING INTEGER PRIMARY KEY (rowid=?)"), "{plan}");
        assert!(!plan.contains("SCAN") && !plan.contains("TEMP B-TREE FOR ORDER"), "{plan}");
    }
}

#[tokio::test]
async fn a_listing_goes_by_key_or_by_age() {
    let after = Cursor { at: Timestamp(1), id: Id([1; 32]) };
    let key = Filter { key: Some("k".to_owned()), ..Filter::default() };
    let id = Filter { id: Some(Id([1; 32])), ..Filter::default() };
    for shared in [false, true] {
        let (_folder, mut connection, sql) = database(shared).await;
        for (filter, after, index) in [
            (&key, None, "SEARCH {keys} USING INDEX sqlite_autoindex_{keys}_1 (id>? AND id<?)"),
            (&key, Some(&after), "SEARCH {keys} USING INDEX sqlite_autoindex_{keys}_1 (id>? AND id<?)"),
            (&id, None, "SEARCH {keys} USING INDEX sqlite_autoindex_{keys}_1 (id=?)"),
            (&Filter::default(), Some(&after), "SEARCH {keys} USING INDEX {keys}_sweep_at"),
            // In order from the index, so that a page ends the scan.
            (&Filter::default(), None, "SCAN {keys} USING INDEX {keys}_sweep_at"),
        ] {
            let mut query = list_query(sql, filter, after, 100);
            let mut query = query.build();
            let arguments = query.take_arguments().expect("they encode").expect("there are some");
            let text = query.sql().as_str().to_owned();
            let plan = plan(&mut connection, &text, arguments).await;
            assert!(plan.contains(&index.replace("{keys}", sql.table)), "{text}\n{plan}");
        }
    }
}

/// A statement that changes no row, or too many, rolls its batch back instead of being believed.
#[tokio::test]
async fn a_lost_row_is_noticed() {
    let (_folder, mut connection, sql) = database(false).await;
    let rows = [(Id([1; 32]), Revision(1))];
    let error = writer::run(&mut connection, &sql.deletes, &rows, |to, (id, revision)| {
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
        let (text, taken) = Statements::of(false).deletes.at_most(rows);
        assert_eq!((text.matches("DELETE").count(), taken), (count, count));
    }
}
