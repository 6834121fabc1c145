//! `onlyonce migrate`: creates the store or brings its schema up to date.

use std::io::Write;

use clap::Args;

use crate::cli::{Failure, StoreArgs};
use crate::config;

/// What `onlyonce migrate` is told.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  onlyonce migrate --store sqlite:/var/lib/onlyonce/keys.db

The proxy does the same at its start; this is for who wants to do it before. Safe to repeat, and from
several machines at once.")]
pub struct MigrateArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

/// Migrates the store.
///
/// # Errors
/// If the store is refused or cannot be migrated; it is then as it was.
pub async fn run(args: &MigrateArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (url, file) = config::load_store(&args.store)?;
    let options = url.options(args.store.allow_volatile || file.allow_volatile());
    let migrated = onlyonce_sqlite::migrate(&options).await?;
    match migrated.from {
        from if from == migrated.to => writeln!(out, "{url} has schema version {from} already")?,
        0 => writeln!(out, "{url} is created, with schema version {}", migrated.to)?,
        from => writeln!(out, "{url} is taken from schema version {from} to {}", migrated.to)?,
    }
    Ok(())
}
