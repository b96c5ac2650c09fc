//! `docs/metrics.md` names every metric, in the words of the table of counters.

use super::known::{FACTS, Metric, metrics};

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

fn row(name: &str, kind: &str, labels: &[&str], meaning: &str) -> String {
    let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
    format!(
        "| `{name}` | {kind} | {} | {meaning} |\n",
        labels.join(", ")
    )
}

fn of_counters(metric: &Metric) -> String {
    let mut labels = metric.labels.to_vec();
    let mut meaning = metric.help.to_owned();
    if metric.has_fates() {
        labels.push("fate");
        let fates = metric.counters.iter();
        let fates: Vec<_> = fates
            .map(|it| format!("`{}`: {}", it.name, it.help))
            .collect();
        meaning = format!("{meaning}. {}", fates.join(". "));
    }
    let kind = if metric.is_now { "gauge" } else { "counter" };
    row(&metric.full_name(), kind, &labels, &meaning)
}

#[test]
fn the_document_has_every_metric_in_these_words() {
    let head = "| metric | type | labels | meaning |\n|---|---|---|---|\n";
    let facts = FACTS.iter();
    let facts = facts.map(|it| row(it.name, "gauge", it.labels, it.help));
    let facts = head.to_owned() + &facts.collect::<String>();
    let counters = head.to_owned() + &metrics().iter().map(of_counters).collect::<String>();
    for table in [facts, counters] {
        assert!(
            DOCUMENT.contains(&table),
            "docs/metrics.md is to have this table:\n{table}"
        );
    }
}

#[test]
fn names_follow_prometheus_rules() {
    let mut names: Vec<_> = metrics().iter().map(Metric::full_name).collect();
    names.extend(FACTS.map(|it| it.name.to_owned()));
    for name in &names {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(
            name.chars().all(legal) && name.starts_with("vnplug_"),
            "{name}"
        );
        for word in ["frames", "bytes", "seconds", "total"] {
            assert!(
                name.split('_').filter(|it| *it == word).count() < 2,
                "{name}"
            );
        }
        for unit in ["_ms", "_ns", "__", "_packets"] {
            assert!(!name.contains(unit), "{name}");
        }
    }
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count, "two have one name");
    let metrics = metrics();
    let helps = metrics.iter().map(|it| it.help);
    for help in helps {
        assert!(!help.contains(['\n', '\\', '"']), "{help}");
    }
}
