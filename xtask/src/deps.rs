//! The direction of dependencies: `core ← {stores, conformance, onlyonce, client} ← cli`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// What one crate of the workspace may depend on.
struct Rule {
    name: &'static str,
    /// Crates of the workspace.
    may: &'static [&'static str],
    /// The same for its tests only.
    may_in_tests: &'static [&'static str],
    /// Crates that must not come in, by whatever way, outside of tests.
    never: &'static [&'static str],
}

const RULES: [Rule; 14] = [
    Rule {
        name: "onlyonce-core",
        may: &[],
        may_in_tests: &[],
        never: &["tower", "tower-layer", "tower-service", "axum", "hyper", "sqlx"],
    },
    Rule {
        name: "onlyonce",
        may: &["onlyonce-core"],
        // Itself, with all its features.
        may_in_tests: &[
            "onlyonce",
            "onlyonce-conformance",
            "onlyonce-postgres",
            "onlyonce-sqlite",
            "onlyonce-testkit",
        ],
        never: &["axum", "sqlx"],
    },
    Rule { name: "onlyonce-conformance", may: &["onlyonce-core"], may_in_tests: &[], never: &["sqlx"] },
    Rule {
        name: "onlyonce-sqlite",
        may: &["onlyonce-core"],
        may_in_tests: &["onlyonce-conformance"],
        never: &["axum", "hyper", "tower"],
    },
    Rule {
        name: "onlyonce-postgres",
        may: &["onlyonce-core"],
        may_in_tests: &["onlyonce-conformance", "onlyonce-testkit"],
        never: &["axum", "hyper", "tower"],
    },
    Rule { name: "onlyonce-testkit", may: &[], may_in_tests: &[], never: &["sqlx"] },
    Rule {
        name: "onlyonce-client",
        may: &["onlyonce-core"],
        // Itself: with all features.
        may_in_tests: &["onlyonce", "onlyonce-client"],
        never: &["axum", "openssl", "native-tls", "aws-lc-rs"],
    },
    Rule {
        name: "onlyonce-consumer",
        may: &["onlyonce", "onlyonce-core"],
        // Itself: with every adapter.
        may_in_tests: &["onlyonce-consumer", "onlyonce-postgres", "onlyonce-sqlite", "onlyonce-testkit"],
        never: &["axum", "sqlx", "openssl", "native-tls", "aws-lc-rs"],
    },
    Rule {
        name: "onlyonce-cli",
        may: &["onlyonce", "onlyonce-client", "onlyonce-core", "onlyonce-postgres", "onlyonce-sqlite"],
        may_in_tests: &["onlyonce-conformance", "onlyonce-testkit"],
        never: &[],
    },
    Rule {
        name: "axum-layer",
        may: &["onlyonce", "onlyonce-postgres", "onlyonce-sqlite"],
        may_in_tests: &["onlyonce-testkit"],
        never: &[],
    },
    Rule {
        name: "axum-payments",
        may: &["onlyonce", "onlyonce-postgres"],
        may_in_tests: &["onlyonce-testkit"],
        never: &["native-tls", "aws-lc-rs"],
    },
    Rule {
        name: "webhook-receiver",
        may: &["onlyonce", "onlyonce-sqlite"],
        may_in_tests: &["onlyonce-testkit"],
        never: &[],
    },
    Rule {
        name: "onlyonce-bench",
        may: &["onlyonce", "onlyonce-core", "onlyonce-postgres", "onlyonce-sqlite", "onlyonce-testkit"],
        may_in_tests: &[],
        never: &[],
    },
    Rule { name: "xtask", may: &[], may_in_tests: &[], never: &["tokio"] },
];

/// A feature that one crate turns on is on for every user of the workspace's crates: these would
/// bring in drivers and parsers that nobody asked for.
const SQLX_FEATURES_OFF: [&str; 7] = ["migrate", "json", "macros", "chrono", "time", "uuid", "any"];

/// Every broken rule, as a sentence.
pub(crate) fn violations(metadata: &Value) -> Result<Vec<String>, String> {
    let graph = Graph::of(metadata).ok_or("cargo metadata is not as expected")?;
    let mut found = Vec::new();
    for id in &graph.members {
        let name = graph.names[id];
        let Some(rule) = RULES.iter().find(|rule| rule.name == name) else {
            found.push(format!("{name} has no rule: say in xtask/src/deps.rs what it may depend on"));
            continue;
        };
        for dependency in &graph.dependencies[id] {
            let other = graph.names[dependency.id];
            let allowed = rule.may.contains(&other)
                || (!dependency.reaches_users && rule.may_in_tests.contains(&other));
            if graph.members.contains(&dependency.id) && !allowed {
                let where_ = if dependency.reaches_users { "" } else { ", not even in tests" };
                found.push(format!("{name} must not depend on {other}{where_}"));
            }
        }
        let reached: HashSet<&str> = graph.reached(id).into_iter().map(|id| graph.names[id]).collect();
        for other in rule.never.iter().filter(|other| reached.contains(*other)) {
            found.push(format!("{name} must not depend on {other}, by whatever way"));
        }
    }
    for feature in graph.sqlx_features.iter().filter(|feature| SQLX_FEATURES_OFF.contains(feature)) {
        found.push(format!("sqlx must not have its feature {feature}"));
    }
    Ok(found)
}

/// What `cargo metadata` says, by package id.
struct Graph<'a> {
    names: HashMap<&'a str, &'a str>,
    members: Vec<&'a str>,
    dependencies: HashMap<&'a str, Vec<Dependency<'a>>>,
    sqlx_features: Vec<&'a str>,
}

struct Dependency<'a> {
    id: &'a str,
    /// Not only for tests.
    reaches_users: bool,
}

impl<'a> Graph<'a> {
    fn of(metadata: &'a Value) -> Option<Self> {
        let packages = metadata["packages"].as_array()?;
        let names: HashMap<_, _> = packages
            .iter()
            .map(|package| Some((package["id"].as_str()?, package["name"].as_str()?)))
            .collect::<Option<_>>()?;
        let members: Option<_> =
            metadata["workspace_members"].as_array()?.iter().map(Value::as_str).collect();
        let mut dependencies = HashMap::new();
        let mut sqlx_features = Vec::new();
        for node in metadata["resolve"]["nodes"].as_array()? {
            let id = node["id"].as_str()?;
            if *names.get(id)? == "sqlx" {
                sqlx_features.extend(node["features"].as_array()?.iter().filter_map(Value::as_str));
            }
            let of_node: Option<Vec<_>> = node["deps"].as_array()?.iter().map(Dependency::of).collect();
            dependencies.insert(id, of_node?);
        }
        Some(Self { names, members: members?, dependencies, sqlx_features })
    }

    /// All that a user of this package gets with it.
    fn reached(&self, from: &'a str) -> HashSet<&'a str> {
        let mut reached = HashSet::new();
        let mut todo = vec![from];
        while let Some(id) = todo.pop() {
            for dependency in self.dependencies.get(id).into_iter().flatten() {
                if dependency.reaches_users && reached.insert(dependency.id) {
                    todo.push(dependency.id);
                }
            }
        }
        reached
    }
}

impl<'a> Dependency<'a> {
    fn of(value: &'a Value) -> Option<Self> {
        let kinds = value["dep_kinds"].as_array()?;
        let reaches_users = kinds.iter().any(|kind| kind["kind"].as_str() != Some("dev"));
        Some(Self { id: value["pkg"].as_str()?, reaches_users })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A workspace of the first four packages; `edges` are (from, to, kind).
    fn workspace(edges: &[(&str, &str, Option<&str>)], sqlx_features: &[&str]) -> Value {
        let members = ["onlyonce-core", "onlyonce", "onlyonce-sqlite", "onlyonce-conformance"];
        let all = [&members[..], &["sqlx", "axum", "middle"]].concat();
        let nodes: Vec<_> = all
            .iter()
            .map(|name| {
                let deps: Vec<_> = edges
                    .iter()
                    .filter(|(from, ..)| from == name)
                    .map(|(_, to, kind)| json!({"pkg": to, "dep_kinds": [{"kind": kind}]}))
                    .collect();
                let features = if *name == "sqlx" { sqlx_features } else { &[] };
                json!({"id": name, "deps": deps, "features": features})
            })
            .collect();
        let packages: Vec<_> = all.iter().map(|name| json!({"id": name, "name": name})).collect();
        json!({"packages": packages, "workspace_members": members, "resolve": {"nodes": nodes}})
    }

    fn found(edges: &[(&str, &str, Option<&str>)], sqlx_features: &[&str]) -> Vec<String> {
        violations(&workspace(edges, sqlx_features)).expect("well-formed")
    }

    #[test]
    fn the_layout_as_designed_is_allowed() {
        let edges = [
            ("onlyonce", "onlyonce-core", None),
            ("onlyonce", "axum", Some("dev")),
            ("onlyonce-sqlite", "onlyonce-core", None),
            ("onlyonce-sqlite", "onlyonce-conformance", Some("dev")),
            ("onlyonce-sqlite", "sqlx", None),
        ];
        assert_eq!(found(&edges, &["sqlite", "runtime-tokio"]), [""; 0]);
    }

    #[test]
    fn each_broken_rule_is_reported() {
        let cases = [
            (("onlyonce-core", "onlyonce", None), "onlyonce-core must not depend on onlyonce"),
            (("onlyonce", "onlyonce-sqlite", None), "onlyonce must not depend on onlyonce-sqlite"),
            (
                ("onlyonce-sqlite", "onlyonce", Some("dev")),
                "onlyonce-sqlite must not depend on onlyonce, not even in tests",
            ),
            (
                ("onlyonce-sqlite", "onlyonce-conformance", None),
                "onlyonce-sqlite must not depend on onlyonce-conformance",
            ),
            (("onlyonce-core", "sqlx", None), "onlyonce-core must not depend on sqlx, by whatever way"),
            (
                ("onlyonce-core", "sqlx", Some("build")),
                "onlyonce-core must not depend on sqlx, by whatever way",
            ),
            (("onlyonce", "axum", None), "onlyonce must not depend on axum, by whatever way"),
        ];
        for (edge, expected) in cases {
            assert_eq!(found(&[edge], &[]), [expected], "{edge:?}");
        }
    }

    #[test]
    fn a_forbidden_crate_is_found_behind_another() {
        let edges = [("onlyonce-core", "middle", None), ("middle", "axum", None)];
        assert_eq!(found(&edges, &[]), ["onlyonce-core must not depend on axum, by whatever way"]);
        let for_tests = [("onlyonce-core", "middle", Some("dev")), ("middle", "axum", None)];
        assert_eq!(found(&for_tests, &[]), [""; 0]);
    }

    #[test]
    fn a_feature_that_must_be_off_is_reported() {
        assert_eq!(found(&[], &["sqlite", "macros"]), ["sqlx must not have its feature macros"]);
    }

    #[test]
    fn a_new_crate_needs_a_rule() {
        let mut workspace = workspace(&[], &[]);
        workspace["workspace_members"] = json!(["middle"]);
        let found = violations(&workspace).expect("well-formed");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("middle has no rule"), "{found:?}");
    }
}
