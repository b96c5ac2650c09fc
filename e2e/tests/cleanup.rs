//! Nothing of a lab stays: not when it is dropped, not when its owner is killed.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use vnplug_e2e::{Image, Lab, LabError, Netns, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::eventually;

/// Process group members that still run; zombies are the business of whoever waits for them.
fn alive_in_group(group: u32) -> usize {
    let stats = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    stats
        .filter(|stat| {
            let fields: Vec<&str> = stat
                .rsplit_once(')')
                .map_or("", |(_, rest)| rest)
                .split_whitespace()
                .collect();
            fields.len() > 2 && fields[0] != "Z" && fields[2] == group.to_string()
        })
        .count()
}

#[test]
fn a_killed_owner_leaves_nothing_after_the_next_lab_starts() {
    if env::var_os(HOLDER).is_some() {
        return hold();
    }
    // This test again, in a process of its own, in the other role.
    let mut holder = Command::new(env::current_exe().unwrap())
        .args([
            "--exact",
            "a_killed_owner_leaves_nothing_after_the_next_lab_starts",
        ])
        .arg("--nocapture")
        .env(HOLDER, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let line = BufReader::new(holder.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap)
        .find(|line| line.starts_with(HOLDER))
        .expect("the holder says what it holds");
    let words: Vec<&str> = line.split_whitespace().collect();
    let (dir, group) = (Path::new(words[1]), words[2].parse().unwrap());
    let netns = Path::new("/run/netns").join(words[3]);
    assert!(dir.is_dir() && netns.exists());
    // User-mode Linux has helpers beside its main process; this is why it is the guest here.
    assert!(alive_in_group(group) > 1);

    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("its processes are gone", || alive_in_group(group) == 0);
    let _lab = Lab::new().unwrap();
    // Labs of other tests sweep too: what another one has begun to remove is gone when it is done.
    eventually("its directory is gone", || !dir.exists());
    eventually("its namespace is gone", || !netns.exists());
}

/// Makes a lab with a guest in a namespace, says so and waits to be killed.
#[expect(clippy::unwrap_used, reason = "a role of a test")]
fn hold() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let config = UmlConfig {
        netns: Some(netns.name().to_owned()),
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    // A line of its own: the test harness has begun one.
    println!(
        "\n{HOLDER} {} {} {}",
        lab.dir().display(),
        guest.pid(),
        netns.name()
    );
    thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_dropped_guest_is_gone_with_all_its_processes() {
    let lab = Lab::new().unwrap();
    let guest = Uml::boot(&lab, UmlConfig::default()).unwrap();
    let (group, dir) = (guest.pid(), guest.dir().to_path_buf());
    assert!(alive_in_group(group) > 1);
    drop(lab);
    assert!(dir.is_dir(), "the guest still needs it");
    drop(guest);
    assert_eq!(alive_in_group(group), 0);
    assert!(!dir.exists());
}

#[test]
fn a_failed_boot_tells_the_consoles_end() {
    let lab = Lab::new().unwrap();
    let config = UmlConfig {
        kernel_args: vec!["rdinit=/nonexistent".to_owned()],
        ..UmlConfig::default()
    };
    let Err(LabError::Boot { what, console, .. }) = Uml::boot(&lab, config) else {
        panic!("it booted")
    };
    assert!(what.contains("first try"), "{what}");
    assert_eq!(console.matches("not syncing").count(), 2, "{console}");
}

#[test]
fn a_guest_that_dies_before_its_greeting_is_booted_once_more() {
    let lab = Lab::new().unwrap();
    let init = lab.dir().join("init");
    // The first boot finds no marker on the host, leaves one and ends.
    let script = format!(
        "#!/bin/sh\nmount -t hostfs none /tmp -o {}\nmkdir /tmp/marker && exit 3\n\
         umount /tmp\nexec /init\n",
        lab.dir().display()
    );
    fs::write(&init, script).unwrap();
    // A line of the guest's, to see that it is the same one at the second try.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let config = UmlConfig {
        image: Image::default().file(&init, "/first", 0o755),
        kernel_args: vec!["rdinit=/first".to_owned()],
        lines: vec![(0, theirs.into())],
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    assert!(lab.dir().join("marker").is_dir() && guest.dir().ends_with("g1"));
    guest
        .run("echo here >/dev/ttyS0", Duration::from_secs(120))
        .unwrap();
    let mut line = [0; 4];
    ours.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"here");
    // The line's other end is the guest's alone: it ends with it.
    guest.kill();
    let mut rest = Vec::new();
    ours.read_to_end(&mut rest).unwrap();
}

#[test]
fn a_qemu_that_does_not_start_says_why() {
    let lab = Lab::new().unwrap();
    let qemu_args = vec!["-device".to_owned(), "no-such-device".to_owned()];
    let failed = Qemu::boot(
        &lab,
        QemuConfig {
            qemu_args,
            ..QemuConfig::default()
        },
    );
    let text = failed
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default();
    assert!(text.contains("no-such-device"), "{text}");
}

const HOLDER: &str = "VNPLUG_LAB_HOLDER";
