//! What is refused, and how; formats of the answer; limits.

use std::fs;

use crate::lab::{Lab, START_NS, Sample, mix, run, udp};
use datafusion::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

#[test]
fn nothing_but_queries_is_done() {
    let lab = Lab::new("only");
    lab.segment(0, &mix(20, 20));
    let out = lab.path("out.csv");
    let secret = lab.path("secret.csv");
    fs::write(&secret, "a,b\n1,2\n").unwrap();
    let (out_text, secret_text) = (out.display(), secret.display());
    let only = "only queries are answered";
    for sql in [
        format!("copy flows to '{out_text}'"),
        format!("explain analyze copy flows to '{out_text}'"),
        format!("copy (select 1) to '{out_text}' stored as csv"),
        format!("create external table x stored as csv location '{secret_text}'"),
        "create table x as select 1".to_owned(),
        "create view x as select 1".to_owned(),
        "create or replace table flows as select 1".to_owned(),
        "drop table flows".to_owned(),
        "insert into segments select * from segments".to_owned(),
        "delete from flows".to_owned(),
        "set datafusion.execution.batch_size = 1".to_owned(),
        "prepare p as select 1".to_owned(),
        "begin".to_owned(),
    ] {
        let text = lab.refusal(&sql, &[]);
        assert!(text.contains(only), "{sql}: {text}");
        assert!(!out.exists(), "{sql}");
    }
    for (sql, words) in [
        ("select 1; drop table flows", "a single SQL statement"),
        ("select 1 into x", "INTO"),
    ] {
        let text = lab.refusal(sql, &[]);
        assert!(text.contains(words) || text.contains(only), "{sql}: {text}");
    }
    for sql in [
        format!("select * from '{secret_text}'"),
        format!("select * from \"{secret_text}\""),
        format!("select * from read_csv('{secret_text}')"),
        "select * from '/etc/passwd'".to_owned(),
    ] {
        let text = lab.refusal(&sql, &[]);
        assert!(
            !text.contains("1,2") && !text.contains("root:"),
            "{sql}: {text}"
        );
    }
    // All is as before.
    assert_eq!(lab.number("select sum(packets) from flows", &[]), 20);
}

#[test]
fn what_only_reads_is_answered() {
    let lab = Lab::new("reads");
    lab.segment(0, &mix(21, 20));
    let beside = || {
        let files = fs::read_dir(&lab.0).unwrap();
        files
            .filter(|file| file.as_ref().unwrap().path().extension().unwrap() == "parquet")
            .count()
    };
    for (sql, part) in [
        ("show tables", "segments"),
        ("describe flows", "tcp_flags"),
        ("explain select count(*) from flows", "logical_plan"),
    ] {
        let text = lab.ask(sql, &[]);
        assert!(text.contains(part), "{sql}: {text}");
        assert_eq!(beside(), 0, "{sql} reads no segment");
    }
    for (sql, part) in [
        ("explain analyze select count(*) from flows", "output_rows"),
        ("values (1), (2)", "2"),
        (
            "with x as (select minute from flows) select count(*) n from x",
            "n",
        ),
        ("select 1 union all select 2", "2"),
    ] {
        let text = lab.ask(sql, &[]);
        assert!(text.contains(part), "{sql}: {text}");
    }
    assert_eq!(beside(), 1);
}

#[test]
fn a_mistake_is_told_with_its_place() {
    let lab = Lab::new("place");
    lab.segment(0, &mix(22, 20));
    let text = lab.refusal("select src,\n  pakets\nfrom flows", &[]);
    assert!(
        text.contains("pakets") && text.contains("line 2, column 3"),
        "{text}"
    );
    assert!(text.contains("\n    pakets\n    ^"), "{text}");
    let text = lab.refusal("select src fro flows where", &[]);
    assert!(text.contains("Line: 1, Column: "), "{text}");
    let text = lab.refusal("select * from flow", &[]);
    assert!(text.contains("flow"), "{text}");
    assert_eq!(run(&["--wrong"]).status.code(), Some(2));
    let text = String::from_utf8(run(&["select 1"]).stderr).unwrap();
    assert!(text.contains("where the recordings are"), "{text}");
    let text = String::from_utf8(run(&["select 1 from flows", "/nowhere"]).stderr).unwrap();
    assert!(text.contains("/nowhere"), "{text}");
}

#[test]
fn a_range_that_ends_before_it_begins_is_wrong_usage() {
    let lab = Lab::new("backwards");
    let range = ["--from", "2026-11-22", "--to", "2026-11-21"];
    let output = lab.try_ask("select 1", &range);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("--from is later than --to"), "{text}");
    lab.ask("select 1", &["--from", "2026-11-21", "--to", "2026-11-21"]);
}

#[test]
fn a_place_without_losses_to_read_is_told() {
    let lab = Lab::new("missing");
    let missing = lab.path("missing");
    let text = lab.refusal("select * from losses", &[missing.to_str().unwrap()]);
    assert!(text.contains("missing: No such file"), "{text}");
}

#[test]
fn an_answer_is_a_table_csv_json_or_parquet() {
    let lab = Lab::new("formats");
    let mut packet = Sample::new(START_NS, udp([10, 0, 0, 1], [10, 0, 0, 2], [1, 53], 60));
    packet.interface = "e,\"\u{1b}[2J";
    lab.segment(0, &[packet]);
    let sql = "select src, interface, bytes, vlan, first from flows";
    let table = lab.ask(sql, &[]);
    assert!(table.starts_with("+-"), "{table}");
    assert!(
        table.contains("\\u{1b}") && !table.contains('\u{1b}'),
        "{table}"
    );
    let empty = lab.ask("select src from flows where packets < 0", &[]);
    assert!(empty.contains("src"), "{empty}");
    let csv = lab.ask(sql, &["--format", "csv"]);
    let line = "10.0.0.1,\"e,\"\"\u{1b}[2J\",60,,2026-11-21T13:45:00Z";
    assert_eq!(csv, format!("src,interface,bytes,vlan,first\n{line}\n"));
    let json = lab.ask(sql, &["--format", "json"]);
    let value: serde_json::Value = serde_json::from_str(json.trim_end()).unwrap();
    assert_eq!(value["src"], "10.0.0.1");
    assert_eq!(value["bytes"], 60);
    assert_eq!(value["vlan"], serde_json::Value::Null);
    assert_eq!(value["first"], "2026-11-21T13:45:00Z");

    let elsewhere = Lab::new("formats-out");
    let file = elsewhere.path("out.parquet");
    fs::write(&file, "old").unwrap();
    assert_eq!(lab.ask(sql, &["-o", file.to_str().unwrap()]), "");
    let reader = ParquetRecordBatchReaderBuilder::try_new(fs::File::open(&file).unwrap());
    let batches: Vec<_> = reader
        .unwrap()
        .build()
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(
        (
            batches.len(),
            batches[0].num_rows(),
            batches[0].num_columns()
        ),
        (1, 1, 5)
    );
    let text = lab.refusal(sql, &["--format", "parquet"]);
    assert!(text.contains("add `-o FILE`"), "{text}");
}

#[test]
fn an_answer_never_replaces_what_it_is_made_from() {
    let lab = Lab::new("replace");
    let segment = lab.segment(0, &mix(23, 20));
    vnplug_store::index::rebuild(&segment).unwrap();
    let index = segment.with_extension("vnx");
    let state = lab.path("t.state");
    fs::write(&state, "{}").unwrap();
    let before = [&segment, &index, &state].map(|file| fs::read(file).unwrap());
    let elsewhere = Lab::new("replace-out");
    let linked = elsewhere.path("linked.csv");
    fs::hard_link(&index, &linked).unwrap();
    for sql in ["select * from flows", "select 1"] {
        for file in [
            &segment,
            &index,
            &state,
            &linked,
            &lab.path("new.csv"),
            &elsewhere.path("x.flows.parquet"),
        ] {
            let text = lab.refusal(sql, &["--format", "csv", "-o", file.to_str().unwrap()]);
            assert!(text.contains("write to another file"), "{text}");
        }
    }
    let after = [&segment, &index, &state].map(|file| fs::read(file).unwrap());
    assert_eq!(after, before);
    // An answer that fails leaves nothing behind.
    let file = elsewhere.path("bad.csv");
    let sql = "select in_net(src, dst || '/x') from flows where src is not null";
    lab.refusal(sql, &["-o", file.to_str().unwrap()]);
    assert!(!file.exists() && !elsewhere.path("bad.csv.part").exists());
}

#[test]
fn memory_is_limited_and_the_directory_for_the_rest_left_clean() {
    let lab = Lab::new("spill");
    let packet = |n: u32| {
        let [a, b, c, d] = n.wrapping_mul(0x9e37_79b1).to_be_bytes();
        Sample::new(
            START_NS + u64::from(n),
            udp([10, a, b, c], [d, 1, 1, 1], [n as u16, 53], 60),
        )
    };
    lab.segment(0, &(0..100_000).map(packet).collect::<Vec<_>>());
    let spill = lab.path("spill");
    fs::create_dir(&spill).unwrap();
    let sql = "select src, dst, src_port, first, last, segment, interface \
               from flows order by dst, src, last";
    let memory = [
        "--memory",
        "24M",
        "--threads",
        "1",
        "--spill",
        spill.to_str().unwrap(),
    ];
    let rows = lab.lines(sql, &memory);
    assert_eq!(rows.len(), 100_000);
    let keys = rows.iter().map(|row| {
        let mut parts = row.split(',');
        let src = parts.next();
        (parts.next(), src)
    });
    assert!(keys.is_sorted());
    assert_eq!(fs::read_dir(&spill).unwrap().count(), 0);
    let mut little = memory;
    little[1] = "100K";
    let text = lab.refusal(sql, &little);
    assert!(text.to_lowercase().contains("memory"), "{text}");
    assert_eq!(fs::read_dir(&spill).unwrap().count(), 0);
}
