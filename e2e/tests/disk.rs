//! The disk-fault lab itself: each fault reaches a plain program, and nothing fails without one.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use vnplug_e2e::{DiskFault, Fault, Guest, Image, Lab, Uml, UmlConfig};
use vnplug_testing::PATIENCE;

/// Also seen by the host's programs, which find it at /mnt (`world`).
const DIR: &str = "/world/mnt";

fn boot(lab: &Lab) -> Guest {
    let file = DiskFault::file(lab, "disk", 64).unwrap();
    let guest = Uml::boot(
        lab,
        UmlConfig {
            kernel_args: vec![DiskFault::kernel_arg(&file)],
            image: DiskFault::image(Image::default().host_root()),
            ..UmlConfig::default()
        },
    )
    .unwrap();
    // However long a test is kept waiting: what is not synced is not written by itself.
    works(&guest, "echo 0 >/proc/sys/vm/dirty_writeback_centisecs");
    guest
}

/// What a command says, and whether it succeeded.
fn said(guest: &Guest, command: &str) -> (bool, String) {
    let output = guest.run(command, PATIENCE).unwrap();
    (output.success(), output.text())
}

fn works(guest: &Guest, command: &str) -> String {
    let (success, text) = said(guest, command);
    assert!(success, "{command}: {text}");
    text
}

fn fails(guest: &Guest, command: &str) {
    let (success, text) = said(guest, command);
    assert!(
        !success && text.contains("Input/output error"),
        "{command}: {text}"
    );
}

#[test]
fn bad_sectors_writes_and_disks_fail_with_eio_and_only_then() {
    let lab = Lab::new().unwrap();
    let guest = boot(&lab);
    let disk = DiskFault::new(&guest, DIR).unwrap();
    let device = DiskFault::DEVICE;
    let write = |block: u32| {
        format!(
            "world dd if=/dev/zero of={device} bs=4096 seek={block} count=1 oflag=direct conv=notrunc"
        )
    };
    let read = |block: u32| {
        format!("world dd if={device} of=/dev/null bs=4096 skip={block} count=1 iflag=direct")
    };

    works(&guest, &write(1000));
    disk.set(Fault::Sectors {
        first: 8000,
        count: 8,
    })
    .unwrap();
    fails(&guest, &write(1000));
    fails(&guest, &read(1000));
    for block in [999, 1001] {
        works(&guest, &write(block));
        works(&guest, &read(block));
    }
    disk.set(Fault::Writes).unwrap();
    fails(&guest, &write(5));
    works(&guest, &read(1000));
    disk.set(Fault::All).unwrap();
    fails(&guest, &read(1000));
    disk.set(Fault::None).unwrap();
    works(&guest, &write(1000));

    let timed = |command: &str| {
        let began = Instant::now();
        works(&guest, command);
        began.elapsed()
    };
    disk.set(Fault::Slow(Duration::from_secs(3))).unwrap();
    assert!(timed(&write(7)) >= Duration::from_secs(3));
    disk.set(Fault::None).unwrap();
    // Busy machines are slow, too; but not so that every write takes as long as that one did.
    let is_quick = |_| timed(&write(7)) < Duration::from_secs(3);
    assert!((0..30).any(is_quick), "it stays slow");
}

#[test]
fn a_file_systems_second_fsync_succeeds_after_data_was_lost() {
    let lab = Lab::new().unwrap();
    let guest = boot(&lab);
    let disk = DiskFault::new(&guest, DIR).unwrap();
    disk.mount().unwrap();
    // What a recorder must not believe: writes, syncs while the disk fails, and syncs again.
    let script = r#"
import os, time
fd = os.open("/mnt/file", os.O_RDWR)
os.pwrite(fd, b"new" * 1365, 0)
for step in "ab":
    open("/tmp/at-" + step, "w").close()
    while not os.path.exists("/tmp/go-" + step): time.sleep(0.01)
    try: os.fdatasync(fd); print("ok")
    except OSError as error: print(error.errno)
"#;
    works(&guest, "yes old | head -c 4095 >/world/mnt/file; sync");
    works(&guest, &format!("cat >/tmp/twice.py <<'END'\n{script}END"));
    let twice = |fault| {
        works(&guest, "rm -f /tmp/at-* /tmp/go-*");
        let job = guest.spawn("world python3 /tmp/twice.py").unwrap();
        for (step, fault) in [("a", fault), ("b", Fault::None)] {
            works(
                &guest,
                &format!("until [ -e /tmp/at-{step} ]; do sleep 0.1; done"),
            );
            disk.set(fault).unwrap();
            works(&guest, &format!("touch /tmp/go-{step}"));
        }
        let text = job.wait(PATIENCE).unwrap().text();
        let kept = works(
            &guest,
            "echo 3 >/proc/sys/vm/drop_caches; head -c 3 /world/mnt/file",
        );
        let words = format!("{text} {kept}");
        words.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(twice(Fault::Writes), "5 ok old");
    // The control: without a fault both succeed, and the data is there.
    assert_eq!(twice(Fault::None), "ok ok new");
}

#[test]
fn a_power_cut_keeps_what_was_synced_and_loses_what_was_not() {
    let lab = Lab::new().unwrap();
    let guest = boot(&lab);
    let disk = DiskFault::new(&guest, DIR).unwrap();
    disk.mount().unwrap();
    let write = |name: &str, sync: &str| format!("yes {name} | head -c 200000 >{DIR}/{name}{sync}");
    let sum = |name: &str| said(&guest, &format!("md5sum </world/mnt/{name}"));
    let sync = "import os; os.fdatasync(os.open('/mnt/synced', os.O_RDWR))";
    let sync = format!(" && world python3 -c \"{sync}\"");
    works(&guest, &write("synced", &sync));
    works(&guest, &write("unsynced", ""));
    let (synced, unsynced) = (sum("synced"), sum("unsynced"));
    disk.cut("").unwrap();
    assert_eq!(sum("synced"), synced);
    assert_ne!(sum("unsynced"), unsynced);
    // The control: without a cut, an unmount keeps both.
    works(&guest, &write("unsynced", ""));
    disk.unmount().unwrap();
    works(&guest, "echo 3 >/proc/sys/vm/drop_caches");
    disk.mount().unwrap();
    assert_eq!((sum("synced"), sum("unsynced")), (synced, unsynced));
}
