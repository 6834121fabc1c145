//! The macros expand to every clause there is.

use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_clause_is_in_a_suite() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let read = |name: &str| std::fs::read_to_string(sources.join(name)).expect("a source file");
    let lib = read("lib.rs");
    let listed: BTreeSet<String> =
        lib.split_whitespace().map(|word| word.trim_matches(';').to_owned()).collect();
    let mut clauses = 0;
    for module in ["register", "bytes", "clock", "sweep", "races", "engine", "faults", "inspect", "transact"]
    {
        let source = read(&format!("{module}.rs"));
        for line in source.lines().filter_map(|line| line.strip_prefix("pub async fn ")) {
            let (clause, _) = line.split_once('(').expect("a function");
            assert!(listed.contains(clause), "{module}::{clause} is in no suite");
            clauses += 1;
        }
    }
    assert!(clauses > 80, "found only {clauses} clauses");
}
