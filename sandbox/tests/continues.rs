//! P30: the program's own call goes on only where registers alone decided, or where what the kernel made of it is judged
//! before it can do anything. Every such place is in this list.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

/// File, and what its line says after `CONTINUE:`.
const PLACES: &[(&str, &str)] = &[
    ("calls/carry.rs", "socket(2) is judged by its registers"),
    (
        "calls/execute.rs",
        "what execve(2) made is looked at before it runs",
    ),
];

#[test]
fn a_programs_call_goes_on_only_at_places_that_are_listed() {
    let mut found = Vec::new();
    search(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut found,
    );
    let listed: Vec<(String, String)> = PLACES
        .iter()
        .map(|(file, why)| ((*file).to_string(), (*why).to_string()))
        .collect();
    assert_eq!(found, listed);
}

fn search(directory: &Path, found: &mut Vec<(String, String)>) {
    let mut entries: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            search(&path, found);
            continue;
        }
        let name = path
            .to_str()
            .unwrap()
            .rsplit_once("/src/")
            .unwrap()
            .1
            .to_string();
        for line in fs::read_to_string(&path).unwrap().lines() {
            // Where answers are written to the kernel, the word stands for what others decided.
            let is_use = line.contains("Answer::Continue") && name != "sys/seccomp.rs";
            if is_use || (line.contains("FLAG_CONTINUE") && name != "sys/seccomp.rs") {
                let why = line.split_once("// CONTINUE: ").map_or("", |(_, why)| why);
                found.push((name.clone(), why.to_string()));
            }
        }
    }
}
