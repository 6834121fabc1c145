//! `onlyonce inbox`: which messages were processed, and letting one be processed again.
//!
//! A message is a key like any other, so this is `onlyonce keys` in the words of whoever consumes a queue.

#[cfg(test)]
mod tests;

use std::io::Write;

use clap::{Args, Subcommand};
use onlyonce::inbox::{HASHED_PREFIX, endpoint_of, key_of};
use onlyonce_core::Id;

use crate::cli::{Failure, StoreArgs};
use crate::keys::{self, FilterArgs, KeyArgs, KeysCommand, Kind, StateArg};

/// What can be done with messages.
#[derive(Subcommand, Clone, Debug)]
pub enum InboxCommand {
    /// List messages, the first received first
    #[command(after_help = "\
Examples:
  onlyonce inbox list
  onlyonce inbox list --consumer billing --state lapsed
  onlyonce inbox list --json | jq '.[] | select(.outcome == \"error\")'

States: running (a worker is at it), lapsed (it waits for its next delivery, or its worker died), done (it was processed, or
given up: then its outcome is an error). The attempts are those of the message so far.")]
    List(ListArgs),
    /// Show everything known about a message, for every consumer of it
    #[command(after_help = "\
Examples:
  onlyonce inbox show order-4711
  onlyonce inbox show order-4711 --consumer billing --json

Exit code 1 if no consumer knows of it.")]
    Show(MessageArgs),
    /// Forget a message: it is processed when it is delivered again, with its attempts counted anew
    #[command(after_help = "\
Examples:
  onlyonce inbox release order-4711 --consumer billing

For a message in the dead-letter queue, before it is sent to its queue again: as long as it is remembered as given up it
is acknowledged unseen. One that was processed is processed a second time. Exit code 1 if no consumer knows of it, 2 if
several do or a worker may be at it (then --force).")]
    Release(ReleaseArgs),
}

impl InboxCommand {
    pub(crate) fn store_args(&mut self) -> &mut StoreArgs {
        match self {
            Self::List(args) => &mut args.store,
            Self::Show(args) => &mut args.store,
            Self::Release(args) => &mut args.message.store,
        }
    }
}

/// Which messages are meant.
#[derive(Args, Clone, Debug, Default)]
pub struct WhichArgs {
    /// Only those of this consumer
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Only in this namespace
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Only the one with this id: 64 hexadecimal digits, as `inbox show` prints them
    #[arg(long, value_name = "ID")]
    id: Option<Id>,
}

impl WhichArgs {
    fn filter(self) -> FilterArgs {
        FilterArgs {
            id: self.id,
            namespace: self.namespace,
            endpoint: self.consumer.as_deref().map(endpoint_of),
            caller: None,
            kind: Kind::Messages,
        }
    }
}

/// What `inbox list` is told.
#[derive(Args, Clone, Debug, Default)]
pub struct ListArgs {
    #[command(flatten)]
    which: WhichArgs,
    /// Only messages in this state
    #[arg(long, value_enum)]
    state: Option<StateArg>,
    /// At most so many; 0 is all of them [default: 100, and all with --json]
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Print a JSON array, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// Which message is meant.
#[derive(Args, Clone, Debug, Default)]
pub struct MessageArgs {
    /// The message's own id, as its producer set it; or sha256:... as it is listed
    message_id: String,
    #[command(flatten)]
    which: WhichArgs,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

impl MessageArgs {
    fn key_args(self) -> Result<KeyArgs, Failure> {
        let key = key(&self.message_id)?;
        Ok(KeyArgs { key, filter: self.which.filter(), json: self.json, store: self.store })
    }
}

/// What `inbox release` is told.
#[derive(Args, Clone, Debug, Default)]
pub struct ReleaseArgs {
    #[command(flatten)]
    message: MessageArgs,
    /// Release it although a worker may be at it
    #[arg(long)]
    force: bool,
}

/// Carries out one command.
///
/// # Errors
/// With the exit code that the command documents. Nothing was written then.
pub async fn run(command: InboxCommand, out: &mut impl Write) -> Result<(), Failure> {
    let command = match command {
        InboxCommand::List(ListArgs { which, state, limit, json, store }) => {
            KeysCommand::List(keys::ListArgs { filter: which.filter(), state, limit, json, store })
        }
        InboxCommand::Show(message) => KeysCommand::Show(message.key_args()?),
        InboxCommand::Release(ReleaseArgs { message, force }) => {
            KeysCommand::Release(keys::ReleaseArgs { key: message.key_args()?, force })
        }
    };
    keys::run(command, out).await
}

/// The key that a message is kept under, from its own id or from that key as it is listed.
fn key(id: &str) -> Result<String, Failure> {
    let listed = id.strip_prefix(HASHED_PREFIX).is_some_and(|digest| digest.parse::<Id>().is_ok());
    if listed {
        return Ok(id.to_owned());
    }
    key_of(id).map(|key| key.to_string()).map_err(|_| Failure::usage("a message id is not empty"))
}
