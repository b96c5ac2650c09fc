//! The lab under User-mode Linux: boot, commands, files, the pool, the vector NIC.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use vnplug_e2e::{Guest, Image, Lab, LabError, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, until};

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn boot(config: UmlConfig) -> (Lab, Guest) {
    let lab = Lab::new().unwrap();
    let guest = Uml::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    (lab, guest)
}

#[test]
fn commands_report_status_and_output_whatever_it_holds() {
    let (_lab, guest) = boot(UmlConfig::default());
    let output = guest
        .run("uname -s; echo to stderr >&2; exit 7", PATIENCE)
        .unwrap();
    assert_eq!(
        (output.status, output.text().as_str()),
        (7, "Linux\nto stderr")
    );

    let odd = guest
        .run("printf 'a\\0b\\n\\377 1 0 0 \\n\\033[2J'", PATIENCE)
        .unwrap();
    assert_eq!(odd.bytes, b"a\0b\n\xff 1 0 0 \n\x1b[2J");

    let large = guest.run("head -c 1000000 /dev/zero", PATIENCE).unwrap();
    assert_eq!(large.bytes, vec![0; 1_000_000]);
    let refused = guest.run("head -c 2000000 /dev/zero", PATIENCE);
    assert!(
        matches!(
            refused,
            Err(LabError::OutputTooLarge {
                len_bytes: 2_000_000
            })
        ),
        "{refused:?}"
    );

    let long = format!("echo {} | wc -c", "x".repeat(100_000));
    assert_eq!(guest.run(&long, PATIENCE).unwrap().text(), "100001");
    assert!(guest.cpu_time() > Duration::ZERO);
    assert_eq!(guest.run("", PATIENCE).unwrap().bytes, b"");
}

#[test]
fn commands_run_side_by_side_and_a_late_one_is_killed() {
    let (_lab, guest) = boot(UmlConfig::default());
    let waiter = guest
        .spawn("until [ -e /tmp/go ]; do sleep 0.1; done; echo went")
        .unwrap();
    assert!(!waiter.is_done());
    guest.run("touch /tmp/go", PATIENCE).unwrap();
    assert_eq!(waiter.wait(PATIENCE).unwrap().text(), "went");

    let start = Instant::now();
    let late = guest.run("echo begun; sleep 1000", Duration::from_millis(500));
    assert!(matches!(late, Err(LabError::Timeout { .. })), "{late:?}");
    assert!(start.elapsed() < PATIENCE);
    assert_eq!(
        guest
            .run("ps | grep -c '[s]leep 1000'", PATIENCE)
            .unwrap()
            .text(),
        "0"
    );

    let job = guest.spawn("echo first words; sleep 1000").unwrap();
    let said = || job.peek(100).unwrap();
    until("it says so", said, |said| said == "first words");
    job.signal("TERM").unwrap();
    assert_eq!(job.wait(PATIENCE).unwrap().status, 128 + 15);
}

#[test]
fn files_and_programs_of_the_host_are_in_the_guest() {
    let (lab, guest) = boot(UmlConfig {
        image: Image::default().program("/usr/bin/tcpdump").file(
            "/etc/os-release",
            "/etc/os-release",
            0o644,
        ),
        ..UmlConfig::default()
    });
    let version = guest.run("tcpdump --version", PATIENCE).unwrap();
    assert!(
        version.success() && version.text().contains("libpcap"),
        "{}",
        version.text()
    );
    let release = guest.run("cat /etc/os-release", PATIENCE).unwrap();
    assert_eq!(release.bytes, fs::read("/etc/os-release").unwrap());

    let content: Vec<u8> = (0..20_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let (out, back) = (lab.dir().join("out"), lab.dir().join("back"));
    fs::write(&out, &content).unwrap();
    guest.push(&out, "/tmp/big", PATIENCE).unwrap();
    guest.pull("/tmp/big", &back, PATIENCE).unwrap();
    assert!(
        fs::read(&back).unwrap() == content,
        "20 MB differ after a round trip"
    );
}

#[test]
fn host_and_guest_see_each_others_bytes_in_the_pool() {
    let lab = Lab::new().unwrap();
    let path = lab.dir().join("pool");
    let pool = fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    pool.set_len(1 << 20).unwrap();
    pool.write_all_at(b"from the host", 4096).unwrap();
    let guest = Uml::boot(
        &lab,
        UmlConfig {
            pool: Some(path),
            ..UmlConfig::default()
        },
    )
    .unwrap();

    let read = guest
        .run(
            "dd if=/dev/mmapper bs=1 skip=4096 count=13 2>/dev/null",
            PATIENCE,
        )
        .unwrap();
    assert_eq!(read.text(), "from the host");
    let wrote = guest
        .run(
            "printf 'from the guest' | dd of=/dev/mmapper bs=1 seek=8192 conv=notrunc",
            PATIENCE,
        )
        .unwrap();
    assert!(wrote.success(), "{}", wrote.text());
    let mut bytes = [0; 14];
    pool.read_exact_at(&mut bytes, 8192).unwrap();
    assert_eq!(&bytes, b"from the guest");
}

#[test]
fn a_panic_of_the_guest_is_told_with_its_console() {
    let (_lab, guest) = boot(UmlConfig::default());
    let gone = guest.run(
        "echo c >/proc/sysrq-trigger; sleep 5; kill -9 -1; poweroff -f",
        PATIENCE,
    );
    assert!(matches!(gone, Err(LabError::GuestGone { .. })), "{gone:?}");
    assert!(guest.wait_exit(PATIENCE).is_some());
}

#[test]
fn programs_of_the_host_run_in_the_guest_as_they_are() {
    let (_lab, guest) = boot(UmlConfig {
        image: Image::default().host_root(),
        ..UmlConfig::default()
    });
    // A program that loads libraries at run time and reads its own files.
    let python = guest
        .run(
            "world python3 -c 'import ssl, socket; print(socket.gethostname())'",
            PATIENCE,
        )
        .unwrap();
    assert!(python.success(), "{}", python.text());
    let shared = guest
        .run(
            "world sh -c 'echo one >/tmp/a; cat /proc/cmdline' && cat /tmp/a",
            PATIENCE,
        )
        .unwrap();
    assert!(
        shared.text().contains("uml_dir=") && shared.text().ends_with("one"),
        "{}",
        shared.text()
    );
    let kept = guest.run("world touch /usr/lib/new", PATIENCE).unwrap();
    assert!(kept.text().contains("Read-only"), "{}", kept.text());
}
