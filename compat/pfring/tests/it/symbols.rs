//! What the header declares, both forms of the library have.

use std::collections::BTreeSet;
use std::process::Command;

use crate::support::{here, library_dir, text_of};

/// Functions that a header declares: a name that starts in one of our ways, before a parenthesis,
/// at the beginning of a declaration.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(here("include/pfring.h")).unwrap();
    let mut names = BTreeSet::new();
    for line in header
        .lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()))
    {
        let Some((before, _)) = line.split_once('(') else {
            continue;
        };
        let name = before.rsplit([' ', '*']).next().unwrap();
        if name.starts_with("pfring_") || name == "gmt_to_local" {
            names.insert(name.to_owned());
        }
    }
    assert!(names.len() > 100, "{names:?}");
    names
}

fn defined(args: &[&str], file: &str) -> BTreeSet<String> {
    let text = text_of(Command::new("nm").args(args).arg(library_dir().join(file)));
    let words = text.lines().filter_map(|line| line.rsplit(' ').next());
    words.map(str::to_owned).collect()
}

#[test]
fn every_declared_call_is_in_both_libraries_and_nothing_else_is_exported() {
    let declared = declared();
    let shared = defined(&["-D", "--defined-only"], "libpfring.so");
    let archive = defined(&["--defined-only"], "libpfring.a");
    let missing: Vec<_> = declared.difference(&shared).collect();
    assert!(missing.is_empty(), "not in libpfring.so: {missing:?}");
    let missing: Vec<_> = declared.difference(&archive).collect();
    assert!(missing.is_empty(), "not in libpfring.a: {missing:?}");
    let more: Vec<_> = shared.difference(&declared).collect();
    assert!(more.is_empty(), "exported and not declared: {more:?}");
}

#[test]
fn the_library_is_found_by_its_name() {
    let about = text_of(
        Command::new("readelf")
            .arg("-d")
            .arg(library_dir().join("libpfring.so")),
    );
    assert!(about.contains("Library soname: [libpfring.so]"), "{about}");
}

#[test]
fn the_document_names_every_call() {
    let document = std::fs::read_to_string(here("../../docs/pfring.md")).unwrap();
    let unnamed: Vec<_> = declared()
        .into_iter()
        .filter(|name| !document.contains(&format!("`{name}`")))
        .filter(|name| !is_trailer(name))
        .collect();
    assert!(unnamed.is_empty(), "{unnamed:?}");
}

/// Calls about timestamps in trailers share one line of the document.
fn is_trailer(name: &str) -> bool {
    let trailers = ["ixia", "metawatch", "arista", "vss_apcon"];
    trailers.iter().any(|trailer| name.contains(trailer))
}
