//! `onlyonce migrate`: creates the store or brings its schema up to date.

use std::io::Write;

use clap::Args;
use onlyonce_core::store::Migrated;

use crate::cli::{Failure, StoreArgs};
use crate::config;

/// What `onlyonce migrate` is told.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  onlyonce migrate --store sqlite:/var/lib/onlyonce/keys.db
  onlyonce migrate --store postgres://app@db.internal/shop
  onlyonce migrate --store postgres://app@db.internal/shop --print > onlyonce.sql

The proxy does the same at its start; this is for who wants to do it before, or has it done by others.
Safe to repeat, and from several machines at once.")]
pub struct MigrateArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print the SQL instead of running it; without --from, all of it, and no database is asked
    #[arg(long)]
    print: bool,
    /// The schema version to start from
    #[arg(long, value_name = "VERSION", requires = "print", default_value_t = 0)]
    from: u32,
}

/// Migrates the store.
///
/// # Errors
/// If the store is refused or cannot be migrated; it is then as it was.
pub async fn run(args: &MigrateArgs, out: &mut impl Write) -> Result<(), Failure> {
    let (url, file) = config::load_store(&args.store)?;
    if args.print {
        let sql = url.migration_sql(args.from).ok_or_else(|| {
            Failure::usage(format!("--print is for databases that others look after; {url} migrates itself"))
        })?;
        write!(out, "{sql}")?;
        return Ok(());
    }
    let Migrated { from, to } = url.migrate(args.store.allow_volatile || file.allow_volatile()).await?;
    match from {
        from if from == to => writeln!(out, "{url} has schema version {from} already")?,
        0 => writeln!(out, "{url} is created, with schema version {to}")?,
        from => writeln!(out, "{url} is taken from schema version {from} to {to}")?,
    }
    Ok(())
}
