//! The `onlyonce` command.

use std::process::ExitCode;

use onlyonce_cli::cli::Cli;

#[tokio::main]
async fn main() -> ExitCode {
    Cli::from_process().run().await
}
