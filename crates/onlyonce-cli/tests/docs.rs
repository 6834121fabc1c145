//! The configuration that the documentation shows is valid, and its defaults are the real ones.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};

use onlyonce_cli::cli::{ProxyArgs, StoreArgs};
use onlyonce_cli::config::{FileConfig, ProxyConfig};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The blocks between ```` ```toml ```` and ```` ``` ````.
fn toml_blocks(markdown: &str) -> Vec<&str> {
    markdown.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn every_configuration_in_the_documentation_is_valid() {
    let mut blocks = 0;
    for page in ["README.md", "docs/configuration.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        for block in toml_blocks(&text) {
            FileConfig::parse(page, block).unwrap_or_else(|error| panic!("{error}\n{block}"));
            blocks += 1;
        }
    }
    assert!(blocks >= 3, "only {blocks} blocks were found");
}

#[test]
fn the_defaults_in_the_documentation_are_the_defaults() {
    let page = std::fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("onlyonce.toml");
    std::fs::write(&file, toml_blocks(&page)[0]).unwrap();
    let load = |config: Option<PathBuf>, upstream: Option<String>| {
        let store = StoreArgs { config, ..StoreArgs::default() };
        ProxyConfig::load(&ProxyArgs { upstream, store, ..ProxyArgs::default() }).unwrap()
    };
    let mut documented = load(Some(file), None);
    let actual = load(None, Some("http://127.0.0.1:3000".into()));
    assert_eq!(documented.defaults.lease(), actual.defaults.lease());
    documented.defaults.lease = None;
    assert_eq!(format!("{documented:#?}"), format!("{actual:#?}"));
}
