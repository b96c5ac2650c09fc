//! What is answered for what the daemon told.

use std::time::Duration;

use clap::CommandFactory;
use vnplug::Counted;
use vnplug_testing::Pages;

use super::Arguments;
use super::families::text;
use crate::ask::Told;

#[test]
fn every_option_stands_in_a_page() {
    let programs = [
        ("vnplug metrics", Arguments::command()),
        ("vnplug web", crate::Arguments::command()),
    ];
    for (name, command) in programs {
        let options = command.get_arguments().filter_map(|it| it.get_long());
        let lacking = Pages::read().lack(name, options);
        assert!(lacking.is_empty(), "docs/ lacks {lacking:#?}");
    }
}

fn counted(kind: &str, name: &str, labels: &[(&str, &str)], values: &[(&str, u64)]) -> Counted {
    let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    Counted {
        kind: kind.into(),
        name: name.into(),
        labels: labels.collect(),
        values: values.iter().map(|(k, v)| ((*k).into(), *v)).collect(),
    }
}

fn port(id: u32, reader: &str) -> Counted {
    let labels = [
        ("device", "host:eth1"),
        ("owner", "vm probe"),
        ("state", "open"),
        ("label", reader),
        ("group", "ids"),
    ];
    let values = [
        ("delivered", 90),
        ("dropped_full", 4),
        ("patience_ms", 1500),
        ("arena_bytes", 4096),
        ("dropped_moon", 1),
        ("reader_mark", 7),
    ];
    counted("port", &id.to_string(), &labels, &values)
}

fn told(counted: Vec<Counted>) -> Told {
    Told {
        server: String::new(),
        counted,
        took: Duration::from_millis(2),
    }
}

#[test]
fn counters_become_metrics() {
    let source = counted(
        "source",
        "eth1",
        &[("state", "up,gone"), ("kind", "af_packet")],
        &[
            ("kernel_dropped", 10),
            ("in_kernel", 7),
            ("bytes", u64::MAX),
            ("freezes", 1),
            ("nic_rx_missed", 3),
        ],
    );
    let switch_port = counted("switch_port", "lan0/port3", &[], &[("in_dropped_vlan", 5)]);
    let all = vec![
        source,
        port(1, "a \"quoted\\\n\u{1b}[2J"),
        port(2, "b"),
        switch_port,
    ];
    let text = text(Some(&told(all)), 1000).unwrap();
    for line in [
        "vnplug_up 1.0",
        "vnplug_answer_seconds 0.002",
        "# TYPE vnplug_source_seen_frames counter",
        "# UNIT vnplug_source_seen_frames frames",
        "vnplug_source_seen_frames_total{source=\"eth1\",fate=\"kernel_dropped\"} 10",
        "# TYPE vnplug_source_in_kernel_frames gauge",
        "vnplug_source_in_kernel_frames{source=\"eth1\"} 7.0",
        "vnplug_source_bytes_total{source=\"eth1\"} 18446744073709551615",
        "vnplug_source_freezes_total{source=\"eth1\"} 1",
        "vnplug_source_up{source=\"eth1\"} 0.0",
        "vnplug_nic_rx_missed_frames_total{source=\"eth1\"} 3",
        "vnplug_port_offered_frames_total{port=\"1\",source=\"eth1\",owner=\"vm probe\",fate=\"dropped_full\"} 4",
        "vnplug_port_patience_seconds{port=\"2\",source=\"eth1\",owner=\"vm probe\"} 1.5",
        "vnplug_group_arena_bytes{source=\"eth1\",group=\"ids\",owner=\"vm probe\"} 4096.0",
        "vnplug_switch_port_in_dropped_vlan_frames_total{switch=\"lan0\",port=\"3\"} 5",
        "vnplug_port_info{port=\"1\",source=\"eth1\",owner=\"vm probe\",reader=\"a \\\"quoted\\\\\\\\x0a\\\\x1b[2J\",group=\"ids\",cluster=\"\"} 1.0",
    ] {
        assert!(text.lines().any(|it| it == line), "no {line} in\n{text}");
    }
    // A group once, and nothing that no table has.
    assert_eq!(text.matches("vnplug_group_arena_bytes{").count(), 1);
    assert!(!text.contains("moon") && !text.contains("reader_mark"));
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn a_source_is_up_unless_a_queue_is_down_gone_or_stalled() {
    for (state, up) in [
        ("up", "1.0"),
        ("ended", "1.0"),
        ("up,behind", "1.0"),
        ("waiting", "1.0"),
        ("up,waiting", "1.0"),
        ("waiting,stalled", "0.0"),
        ("up,down", "0.0"),
        ("gone", "0.0"),
        ("missing", "0.0"),
        ("failed", "0.0"),
        ("", "0.0"),
    ] {
        let source = counted("source", "file", &[("state", state)], &[]);
        let text = text(Some(&told(vec![source])), 1000).unwrap();
        let line = format!("\nvnplug_source_up{{source=\"file\"}} {up}\n");
        assert!(text.contains(&line), "{state}: {text}");
    }
}

#[test]
fn a_silent_daemon_is_told() {
    let text = text(None, 1000).unwrap();
    assert!(
        text.contains("\nvnplug_up 0.0\n") && text.lines().count() == 4,
        "{text}"
    );
}

#[test]
fn many_ports_make_no_longer_answer() {
    let all = (1..=50).rev().map(|id| port(id, "x")).collect();
    let text = text(Some(&told(all)), 10).unwrap();
    assert!(text.contains("\nvnplug_ports_left_out 40.0\n"), "{text}");
    assert_eq!(text.matches("fate=\"delivered\"").count(), 10);
    // Those that were first stay.
    assert!(text.contains("port=\"10\"") && !text.contains("port=\"11\""));
}
