//! Nothing of a lab stays: not when it is dropped, not when its owner is killed.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_e2e::{Lab, LabError, Netns, Qemu, QemuConfig, Uml, UmlConfig};

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

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
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
    thread::sleep(Duration::from_secs(60));
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
    let Err(LabError::Boot { console, .. }) = Uml::boot(&lab, config) else {
        panic!("it booted")
    };
    assert!(console.contains("panic"), "{console}");
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
