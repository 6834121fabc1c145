//! The `onlyonce` command as a library, so that a program or a test can run proxies of its own.
//!
//! | module | holds |
//! |---|---|
//! | [`cli`] | the command line and its exit codes |
//! | [`config`], [`duration`], [`upstream`], [`store`] | what the proxy is told, checked |
//! | [`proxy`] | [`proxy::start`], and how a proxy ends |
//! | `server`, [`forward`], [`headers`] | requests in, requests out, and their header lines |
//! | [`jwt`] | the caller as a claim of a verified token |
//! | `admin`, [`telemetry`], [`metered`] | health, metrics, logs |
//! | [`keys`], [`inbox`], [`doctor`], [`migrate`] | what people do with a store |
//! | [`send`] | one request, sent until its outcome is known |
//! | [`run`], [`runs`] | a command, run once for each period |
//! | [`demo`] | a payments API with and without the proxy |
//!
//! ```no_run
//! use onlyonce_cli::config::ProxyConfig;
//! use onlyonce_cli::store::StoreUrl;
//! use onlyonce_cli::upstream::Upstream;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let upstream = Upstream::parse("http://127.0.0.1:3000")?;
//! let mut config = ProxyConfig::new(upstream, StoreUrl::file("keys.db"));
//! config.listen = "127.0.0.1:0".into();
//! config.admin = "127.0.0.1:0".into();
//! let proxy = onlyonce_cli::proxy::start(config).await?;
//! println!("listening on {}", proxy.addr());
//! proxy.shutdown();
//! proxy.stopped().await;
//! # Ok(())
//! # }
//! ```

// A test that unwraps says where it failed.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod admin;
pub mod cli;
pub mod config;
mod connect;
pub mod demo;
pub mod doctor;
pub mod duration;
pub mod forward;
pub mod headers;
pub mod inbox;
pub mod jwt;
pub mod keys;
pub mod metered;
pub mod migrate;
pub mod proxy;
pub mod run;
pub mod runs;
pub mod send;
mod server;
pub mod store;
pub mod telemetry;
pub mod upstream;
