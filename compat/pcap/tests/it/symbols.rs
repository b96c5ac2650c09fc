//! The drop-in exports what the system's libpcap exports.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo put the library: beside this test's directory of binaries.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("libvnplug_pcap.so");
    assert!(path.is_file(), "{} was not built", path.display());
    path
}

fn output(program: &str, args: &[&str], file: &Path) -> String {
    let output = Command::new(program).args(args).arg(file).output().unwrap();
    assert!(output.status.success(), "{program}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// (name, `function` or bytes of the data) of each dynamic symbol.
fn exports(file: &Path) -> BTreeSet<(String, String)> {
    let symbol = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [_, size, kind, name] = words[..] else {
            panic!("{line}");
        };
        let what = match kind {
            "T" => "function".to_owned(),
            _ => size.trim_start_matches('0').to_owned(),
        };
        (name.to_owned(), what)
    };
    let text = output("nm", &["-D", "--defined-only", "--print-size"], file);
    text.lines().map(symbol).collect()
}

/// The real one.
fn system() -> PathBuf {
    let path = PathBuf::from("/usr/lib/x86_64-linux-gnu/libpcap.so.0.8");
    assert!(path.is_file(), "install libpcap0.8");
    path
}

#[test]
fn every_symbol_of_the_systems_libpcap_is_exported_and_few_others() {
    let (ours, theirs) = (exports(&library()), exports(&system()));
    assert!(theirs.len() > 90, "{theirs:?}");
    let missing: Vec<_> = theirs.difference(&ours).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let more: Vec<_> = ours.difference(&theirs).map(|(name, _)| name).collect();
    // Two that PF_RING's libpcap has, and the mark.
    let known = [
        "pcap_set_application_name",
        "pcap_set_watermark",
        "vnplug_libpcap",
    ];
    assert_eq!(more, known);
}

#[test]
fn the_loader_knows_it_by_libpcaps_name_and_it_needs_no_libpcap() {
    let header = output("objdump", &["-p"], &library());
    let of = |key: &str| -> Vec<&str> {
        let lines = header
            .lines()
            .filter_map(|line| line.trim().strip_prefix(key));
        lines.map(str::trim).collect()
    };
    assert_eq!(of("SONAME"), ["libpcap.so.0.8"]);
    assert!(of("NEEDED").iter().all(|name| !name.contains("pcap")));
}
