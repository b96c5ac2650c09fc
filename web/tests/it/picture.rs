//! The timeline as a picture, drawn without a browser.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::http::recording;
use crate::support::*;

#[test]
fn the_picture_is_drawn_without_a_browser() {
    let place = TestDir::new("web");
    recording(&place);
    let file = place.0.join("timeline.svg");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-web"));
    let status = command
        .arg("--svg")
        .arg(&file)
        .arg(&place.0)
        .status()
        .unwrap();
    assert!(status.success());
    let svg = fs::read_to_string(&file).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    for words in ["1001 packets", "0 lost", "no packets for 1 min", "13:45:00"] {
        assert!(svg.contains(words), "{words}: {svg}");
    }
    assert_eq!(svg.matches('<').count(), svg.matches('>').count());
}

#[test]
fn a_picture_takes_the_place_of_no_file_of_the_recording() {
    let place = TestDir::new("web");
    let mut recorder = recorder(&place.0);
    take(&mut recorder, START, &udp(9, 100), 0);
    recorder.finish();
    let packed = place.0.join("other.pcapng.zst");
    fs::write(&packed, "packed").unwrap();
    let scratch = TestDir::new("web");
    let draw = |file: &Path, of: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-web"));
        let output = command.arg("--svg").arg(file).arg(of).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let entries = || fs::read_dir(&place.0).unwrap().map(|e| e.unwrap().path());
    let files: Vec<PathBuf> = entries().collect();
    assert!(files.len() >= 4, "{files:?}");
    for (n, file) in files.iter().enumerate() {
        let before = fs::read(file).unwrap();
        let [link, name] = ["link", "name"].map(|kind| scratch.0.join(format!("{n}.{kind}")));
        symlink(file, &link).unwrap();
        fs::hard_link(file, &name).unwrap();
        for file in [file, &link, &name] {
            let (code, said) = draw(file, &place.0);
            assert_eq!(code, Some(1), "{file:?}");
            assert!(said.contains("another name"), "{file:?}: {said}");
        }
        assert_eq!(fs::read(file).unwrap(), before, "{file:?}");
    }
    // A capture file by itself, and its index.
    let segment = files
        .iter()
        .find(|f| f.extension().is_some_and(|e| e == "pcapng"));
    let segment = segment.unwrap();
    for file in [segment, &segment.with_extension("vnx")] {
        assert_eq!(draw(file, segment).0, Some(1), "{file:?}");
    }
    assert_eq!(draw(&place.0.join("new.pcap"), &place.0).0, Some(1));
    assert_eq!(entries().count(), files.len());
    fs::remove_file(packed).unwrap();
    assert_eq!(draw(&place.0.join("new.svg"), &place.0).0, Some(0));
    assert_eq!(draw(Path::new("/dev/null"), &place.0).0, Some(0));
    assert_eq!(entries().count(), files.len());
}

#[test]
fn a_picture_that_cannot_be_written_leaves_the_old_one() {
    let (place, scratch) = (TestDir::new("web"), TestDir::new("web"));
    recording(&place);
    let (file, link) = (scratch.0.join("a.svg"), scratch.0.join("b.svg"));
    fs::write(&file, "before").unwrap();
    symlink(&file, &link).unwrap();
    // A file may have 512 bytes; the signal that says so is ignored.
    let draw = |limit: &str| {
        let shell = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &shell,
            "sh",
            env!("CARGO_BIN_EXE_vnplug-web"),
            "--svg",
        ]);
        command
            .arg(&link)
            .arg(&place.0)
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!(draw("1"), Some(1));
    assert_eq!(fs::read_to_string(&file).unwrap(), "before");
    assert_eq!(draw("unlimited"), Some(0));
    assert!(fs::read_to_string(&file).unwrap().starts_with("<svg "));
    assert!(link.is_symlink());
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 2);
}
