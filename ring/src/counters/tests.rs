//! Sums that close, sums that do not, and the tables of the document.

use super::*;
use crate::control::Counted;

const DOCUMENT: &str = include_str!("../../../docs/vnplugd.md");

fn counted(kind: &str, name: &str, values: &[(&str, u64)]) -> Counted {
    Counted {
        kind: kind.into(),
        name: name.into(),
        labels: vec![("device".into(), "host:eth1".into())],
        values: values.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
    }
}

/// A source and two ports, of which the second has this many delivered.
fn some(delivered: u64) -> Vec<Counted> {
    let port = |name, delivered| {
        let values = [
            ("offered", 100),
            ("refused", 1),
            ("paused", 0),
            ("direction", 2),
            ("filtered", 3),
            ("ruled_out", 0),
            ("sampled_out", 0),
            ("program", 0),
            ("delivered", delivered),
            ("dropped_full", 4),
            ("dropped_quarantine", 0),
            ("rings", 2),
        ];
        counted("port", name, &values)
    };
    let source = [
        ("seen", 120),
        ("early", 3),
        ("program", 0),
        ("read", 100),
        ("kernel_dropped", 10),
        ("in_kernel", 7),
        ("duties", 205),
        ("departed_offered", 5),
        ("departed_accounted", 5),
    ];
    vec![
        counted("daemon", "vnplugd", &[("ports", 2)]),
        counted("source", "eth1", &source),
        port("1", 90),
        port("2", delivered),
    ]
}

#[test]
fn accounts_that_add_up_close() {
    let found = accounts(&some(90));
    assert_eq!(found.len(), 5);
    assert!(found.iter().all(Account::closes), "{found:?}");
}

#[test]
fn one_packet_too_few_or_too_many_is_named() {
    for (delivered, missing) in [(89, 1), (91, -1)] {
        let found = accounts(&some(delivered));
        let open: Vec<_> = found.iter().filter(|it| !it.closes()).collect();
        assert_eq!(open.len(), 1);
        assert_eq!(open[0].about, "port 2");
        assert_eq!(
            (open[0].total, open[0].difference()),
            (("offered", 100), missing)
        );
    }
}

#[test]
fn what_is_sent_adds_up_too() {
    let fates = SENDER.iter().filter(|it| it.part_of.is_some());
    let mut values: Vec<(&str, u64)> = fates.map(|fate| (fate.name, 2)).collect();
    values.push(("send_taken", 24));
    let found = accounts(&[counted("source", "lab", &values)]);
    assert!(found.len() == 1 && found[0].closes(), "{found:?}");
    values[0].1 = 3;
    assert!(!accounts(&[counted("port", "1", &values)])[0].closes());
}

#[test]
fn what_is_not_counted_is_not_judged() {
    assert_eq!(accounts(&[counted("source", "eth1", &[("seen", 7)])]), []);
}

#[test]
fn a_newer_daemons_reason_to_drop_counts() {
    let mut all = some(88);
    all[3].values.push(("dropped_moon".into(), 2));
    assert!(accounts(&all).iter().all(Account::closes));
}

/// The tables of the document, as they have to be.
#[test]
fn the_document_has_every_counter_in_these_words() {
    let tables = [
        ("a source", SOURCE),
        ("the interface of a source", NIC),
        ("a port", PORT),
        ("a port that sends, and of a source", SENDER),
        ("the generator", ECHO),
        ("a switch", SWITCH),
        ("a port of a switch", SWITCH_PORT),
        ("the daemon", DAEMON),
        ("a VM", VM),
        ("a back-end", BACKEND),
    ];
    for (of, table) in tables {
        let mut text = format!("| counter of {of} | unit | counts |\n|---|---|---|\n");
        for Counter {
            name, unit, help, ..
        } in table
        {
            let unit = match unit {
                Unit::Frames => "frames",
                Unit::Bytes => "bytes",
                Unit::Times => "times",
                Unit::Milliseconds => "ms",
                Unit::Nanoseconds => "ns",
                Unit::Things => "now",
            };
            text += &format!("| `{name}` | {unit} | {help} |\n");
        }
        assert!(
            DOCUMENT.contains(&text),
            "docs/vnplugd.md is to have this table:\n{text}"
        );
    }
}
