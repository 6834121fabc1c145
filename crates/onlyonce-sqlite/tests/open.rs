//! What is opened, what is refused, and in which words.

mod common;

use std::path::Path;

use common::{application, connect, execute, operation, running};
use onlyonce_core::Store;
use onlyonce_core::store::Inserted;
use onlyonce_sqlite::{
    OpenErrorKind, SCHEMA_VERSION, SqliteOptions, SqliteStore, Synchronous, migrate, schema_version,
};
use sqlx::Connection;

/// The refusal of a database, which is one line and names what it is about.
async fn refused(options: &SqliteOptions, names: &[&str]) {
    for error in [
        SqliteStore::open(options).await.map(drop).expect_err("it must be refused"),
        migrate(options).await.map(drop).expect_err("it must be refused"),
    ] {
        assert_eq!(error.kind(), OpenErrorKind::Refused, "{error}");
        let message = error.to_string();
        assert!(!message.contains('\n'), "{message}");
        for name in names {
            assert!(message.contains(name), "{message}");
        }
    }
}

fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = folder
        .read_dir()
        .expect("a folder")
        .map(|entry| entry.expect("an entry"))
        .map(|entry| {
            let bytes = std::fs::read(entry.path()).expect("a file");
            (entry.file_name().into_string().expect("a name"), bytes)
        })
        .collect();
    files.sort();
    files
}

#[tokio::test]
async fn a_new_file_is_durable() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.db");
    for (url, synchronous) in [
        (format!("sqlite:{}", path.display()), 2),
        (format!("sqlite://{}?synchronous=extra", path.display()), 3),
    ] {
        let store = SqliteStore::open(&url.parse().expect("a URL")).await.expect("it opens");
        let facts = store.facts().await.expect("it reads");
        assert_eq!((facts.journal_mode.as_str(), facts.synchronous), ("wal", synchronous));
        assert_eq!((facts.schema_version, facts.records), (SCHEMA_VERSION, 0));
        assert_eq!(store.path(), Some(path.as_path()));
        store.close().await.expect("it closes");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_mode() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().expect("a folder");
    let mode = |name: &str| {
        let metadata = folder.path().join(name).metadata().unwrap_or_else(|error| panic!("{name}: {error}"));
        metadata.permissions().mode() & 0o777
    };
    let new = SqliteStore::open(&SqliteOptions::file(folder.path().join("new.db"))).await.expect("it opens");
    new.insert(&operation("k"), running(1)).await.expect("it writes");
    for name in ["new.db", "new.db-wal", "new.db-shm"] {
        assert_eq!(mode(name), 0o600, "{name}");
    }

    let old = folder.path().join("old.db");
    std::fs::write(&old, "").expect("a file");
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o640)).expect("its mode");
    let old = SqliteStore::open(&SqliteOptions::file(old)).await.expect("it opens");
    old.insert(&operation("k"), running(1)).await.expect("it writes");
    for name in ["old.db", "old.db-wal"] {
        assert_eq!(mode(name), 0o640, "{name}");
    }
}

#[tokio::test]
async fn what_is_volatile_is_refused_unless_allowed() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = SqliteOptions::file(folder.path().join("keys.db"));
    for (options, reason) in [
        (SqliteOptions::memory(), "memory"),
        (file.clone().synchronous(Synchronous::Normal), "synchronous=normal"),
        (file.synchronous(Synchronous::Off), "synchronous=off"),
    ] {
        refused(&options, &["volatile", reason, "allow_volatile"]).await;
        assert_eq!(files(folder.path()), [], "nothing may be created");
    }
    let allowed = SqliteOptions::memory().allow_volatile(true);
    let store = SqliteStore::open(&allowed).await.expect("it opens");
    let another = SqliteStore::open(&allowed).await.expect("it opens");
    for store in [&store, &another] {
        assert!(matches!(store.insert(&operation("k"), running(1)).await, Ok(Inserted::New(_))));
        assert!(matches!(store.insert(&operation("k"), running(2)).await, Ok(Inserted::Exists(_))));
    }
}

/// In either journal mode, whether or not its log is still beside it.
#[tokio::test]
async fn a_foreign_database_is_left_as_it_is() {
    for (mode, close) in [("DELETE", true), ("WAL", true), ("WAL", false)] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("theirs.db");
        let mut theirs = connect(&path).await;
        execute(&mut theirs, &format!("PRAGMA journal_mode = {mode}")).await;
        execute(&mut theirs, "CREATE TABLE accounts (id INTEGER); INSERT INTO accounts VALUES (1)").await;
        let mut kept_open = Some(theirs);
        if close {
            kept_open.take().expect("open").close().await.expect("it closes");
        }
        // The shared-memory index is no part of the content.
        let content = || {
            let mut files = files(folder.path());
            files.retain(|(name, bytes)| !name.ends_with("-shm") && !bytes.is_empty());
            files
        };
        let before = content();
        refused(&SqliteOptions::file(&path), &["theirs.db", "another application"]).await;
        assert!(schema_version(&SqliteOptions::file(&path)).await.is_err());
        assert_eq!(content(), before, "{mode}");
    }
}

#[tokio::test]
async fn an_application_id_or_a_version_of_another_is_foreign() {
    for pragma in ["application_id = 252006673", "user_version = 1"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("theirs.db");
        let mut theirs = connect(&path).await;
        execute(&mut theirs, &format!("PRAGMA {pragma}")).await;
        theirs.close().await.expect("it closes");
        refused(&SqliteOptions::file(&path), &["another application"]).await;
    }
}

#[tokio::test]
async fn a_file_that_is_no_database_is_left_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notes.txt");
    std::fs::write(&path, "buy milk\n".repeat(1_000)).expect("it writes");
    let before = files(folder.path());
    refused(&SqliteOptions::file(&path), &["notes.txt", "not a SQLite database"]).await;
    assert_eq!(files(folder.path()), before);
}

#[tokio::test]
async fn a_newer_schema_is_refused_with_both_versions() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = SqliteOptions::file(folder.path().join("keys.db"));
    migrate(&options).await.expect("it migrates");
    let newer = SCHEMA_VERSION + 1;
    let mut by_hand = connect(&folder.path().join("keys.db")).await;
    execute(&mut by_hand, &format!("PRAGMA user_version = {newer}")).await;
    by_hand.close().await.expect("it closes");
    let (has, knows) = (format!("version {newer}"), format!("up to {SCHEMA_VERSION}"));
    refused(&options, &["keys.db", &has, &knows]).await;
    assert_eq!(schema_version(&options).await.expect("it reads"), Some(newer));
}

/// Without the unique id two claims of one key would both pass.
#[tokio::test]
async fn a_table_without_its_unique_id_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = SqliteOptions::file(folder.path().join("keys.db"));
    migrate(&options).await.expect("it migrates");
    let mut by_hand = connect(&folder.path().join("keys.db")).await;
    execute(
        &mut by_hand,
        "CREATE TABLE copy AS SELECT * FROM idempotency_keys; DROP TABLE idempotency_keys; \
         ALTER TABLE copy RENAME TO idempotency_keys",
    )
    .await;
    refused(&options, &["keys.db", "no unique index on id"]).await;
    execute(&mut by_hand, "CREATE UNIQUE INDEX id ON idempotency_keys (id)").await;
    SqliteStore::open(&options).await.expect("an index of another name is as good");
    execute(&mut by_hand, "ALTER TABLE idempotency_keys DROP COLUMN granted_at").await;
    refused(&options, &["keys.db", "not as it was made", "granted_at"]).await;
}

#[tokio::test]
async fn a_place_that_cannot_be_written_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    refused(&SqliteOptions::file(folder.path()), &["is a folder"]).await;
    let absent = folder.path().join("absent/keys.db");
    refused(&SqliteOptions::file(&absent), &["absent", "does not exist"]).await;
    assert_eq!(files(folder.path()), []);
}

/// The super-user may write anywhere but here.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_read_only_file_system_is_refused() {
    refused(&SqliteOptions::file("/proc/keys.db"), &["/proc", "takes no new files"]).await;
}

#[cfg(unix)]
#[tokio::test]
async fn a_read_only_folder_or_file_is_refused() {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.db");
    let options = SqliteOptions::file(&path);
    migrate(&options).await.expect("it migrates");
    set_permissions(&path, Permissions::from_mode(0o444)).expect("it is ours");
    let binds = std::fs::OpenOptions::new().append(true).open(&path).is_err();
    let opened = SqliteStore::open(&options).await.map(drop);
    // The super-user is not bound by a mode.
    assert_eq!(opened.is_err(), binds);
    if binds {
        refused(&options, &["keys.db", "read-only"]).await;
        set_permissions(&path, Permissions::from_mode(0o644)).expect("it is ours");
        set_permissions(folder.path(), Permissions::from_mode(0o555)).expect("it is ours");
        refused(&options, &["keys.db", "takes no new files"]).await;
        set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
    }
}

#[tokio::test]
async fn an_absent_file_is_created_only_if_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.db");
    let options = SqliteOptions::file(&path).create(false);
    let error = SqliteStore::open(&options).await.map(drop).expect_err("there is no file");
    assert_eq!(error.kind(), OpenErrorKind::Failed);
    assert!(error.to_string().contains("keys.db does not exist"), "{error}");
    assert_eq!(schema_version(&options).await.expect("it looks"), None);
    assert_eq!(files(folder.path()), []);
}

#[tokio::test]
async fn a_migration_says_what_it_did() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = SqliteOptions::file(folder.path().join("keys.db"));
    let first = migrate(&options).await.expect("it migrates");
    assert_eq!((first.from, first.to), (0, SCHEMA_VERSION));
    let second = migrate(&options).await.expect("it migrates");
    assert_eq!((second.from, second.to), (SCHEMA_VERSION, SCHEMA_VERSION));
    assert_eq!(schema_version(&options).await.expect("it reads"), Some(SCHEMA_VERSION));
}

/// A name that reads as one of SQLite's own URIs, or has its syntax in it, is a name.
#[cfg(unix)]
#[tokio::test]
async fn a_strange_name_is_a_name() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["file:x?mode=memory", "a b?#%41", "schlüssel", ":memory:"] {
        let path = folder.path().join(name);
        let store = SqliteStore::open(&SqliteOptions::file(&path)).await.expect(name);
        store.close().await.expect("it closes");
        assert!(path.is_file(), "{name}");
    }
}

// A file that is shared with an application.

fn shared(path: &Path) -> SqliteOptions {
    SqliteOptions::file(path).shared(true)
}

#[tokio::test]
async fn an_applications_file_is_opened_only_if_it_is_shared() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    let pool = application::start(&path, 1).await;
    refused(&SqliteOptions::file(&path), &["application.db", "another application", "shared=true"]).await;
    assert_eq!(schema_version(&shared(&path)).await.expect("it looks"), None);
    let migrated = migrate(&shared(&path)).await.expect("it migrates");
    assert_eq!((migrated.from, migrated.to), (0, SCHEMA_VERSION));
    assert_eq!(schema_version(&shared(&path)).await.expect("it looks"), Some(SCHEMA_VERSION));
    let again = migrate(&shared(&path)).await.expect("it migrates");
    assert_eq!((again.from, again.to), (SCHEMA_VERSION, SCHEMA_VERSION));
    let url = format!("sqlite:{}?shared=true", path.display());
    let store = SqliteStore::open(&url.parse().expect("a URL")).await.expect("it opens");
    assert_eq!(store.facts().await.expect("it reads").schema_version, SCHEMA_VERSION);
    assert!(matches!(store.insert(&operation("k"), running(1)).await, Ok(Inserted::New(_))));
    // Still not Onlyonce's.
    refused(&SqliteOptions::file(&path), &["another application"]).await;
    drop(pool);
}

/// Whoever comes first, the store or the application's tables.
#[tokio::test]
async fn a_new_file_may_be_shared() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    let store = SqliteStore::open(&shared(&path)).await.expect("it opens");
    let facts = store.facts().await.expect("it reads");
    assert_eq!((facts.journal_mode.as_str(), facts.synchronous), ("wal", 2));
    let pool = application::start(&path, 1).await;
    store.transactions(&pool).await.expect("it is the same file");
    assert_eq!(schema_version(&shared(&path)).await.expect("it looks"), Some(SCHEMA_VERSION));
}

/// What is refused stays as it is, byte for byte.
#[tokio::test]
async fn what_cannot_be_shared_is_left_as_it_is() {
    let newer = SCHEMA_VERSION + 1;
    let versions = "PRAGMA journal_mode = WAL; CREATE TABLE onlyonce_schema_versions (version INTEGER)";
    let newest = format!("{versions}; INSERT INTO onlyonce_schema_versions VALUES (1), ({newer})");
    let (has, knows) = (format!("version {newer}"), format!("up to {SCHEMA_VERSION}"));
    for (made, names) in [
        ("CREATE TABLE accounts (id)", &["no write-ahead log", "`PRAGMA journal_mode = WAL`"][..]),
        (newest.as_str(), &[has.as_str(), &knows, "newer onlyonce"]),
        ("PRAGMA journal_mode = WAL; CREATE TABLE onlyonce_idempotency_keys (id)", &["begin with onlyonce_"]),
        ("PRAGMA application_id = 485359617; PRAGMA user_version = 1", &["one of Onlyonce's own"]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("application.db");
        let mut theirs = connect(&path).await;
        execute(&mut theirs, made).await;
        theirs.close().await.expect("it closes");
        let content = || {
            let mut files = files(folder.path());
            files.retain(|(name, bytes)| !name.ends_with("-shm") && !bytes.is_empty());
            files
        };
        let before = content();
        refused(&shared(&path), &[&["application.db"], names].concat()).await;
        assert_eq!(content(), before, "{made}");
    }
    refused(
        &SqliteOptions::memory().shared(true).allow_volatile(true),
        &["memory", "shared=true needs a file"],
    )
    .await;
}

#[tokio::test]
async fn a_shared_table_without_its_unique_id_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    migrate(&shared(&path)).await.expect("it migrates");
    let mut by_hand = connect(&path).await;
    execute(
        &mut by_hand,
        "CREATE TABLE copy AS SELECT * FROM onlyonce_idempotency_keys; DROP TABLE onlyonce_idempotency_keys; \
         ALTER TABLE copy RENAME TO onlyonce_idempotency_keys",
    )
    .await;
    refused(&shared(&path), &["application.db", "onlyonce_idempotency_keys has no unique index on id"]).await;
}
