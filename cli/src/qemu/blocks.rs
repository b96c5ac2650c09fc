//! The names of QEMU's memory blocks, which outlive the devices that brought them.
//!
//! ```text
//! device_add   hw/misc/ivshmem.c names its block after its slot and its memory: 0000:00:1f.0/vnplug-a-mem
//! device_del   the name stays: it is taken back only from a BAR that is mapped, and this one no more is
//! object-del   the block goes when all of QEMU's threads have passed by (RCU), some 50 ms later
//! ```
//!
//! A device that brings the same name to the same slot before that **aborts the VM** ("RAMBlock …
//! already registered, abort!", softmmu/physmem.c; seen with QEMU 7.2, device_add right behind object-del).

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::monitor::{Monitor, MonitorError};
use super::parts::Part;

/// Waits until no block of a device that is gone has a name that one of `missing` would bring. The names
/// that are still there at the end of `limit`; none is what is wanted.
///
/// # Errors
/// [`MonitorError`], also if QEMU does not show its blocks.
pub(super) fn wait_until_gone(
    monitor: &mut dyn Monitor,
    missing: &[&Part],
    limit: Duration,
) -> Result<Vec<String>, MonitorError> {
    let deadline = Instant::now() + limit;
    loop {
        let stale = stale(monitor, missing)?;
        if stale.is_empty() || Instant::now() >= deadline {
            return Ok(stale);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn stale(monitor: &mut dyn Monitor, missing: &[&Part]) -> Result<Vec<String>, MonitorError> {
    // HMP: there is no command of QMP that lists them.
    let command = json!({"command-line": "info ramblock"});
    let told = monitor.execute("human-monitor-command", command)?;
    let blocks = names(told.as_str().unwrap_or_default());
    let mut stale = Vec::new();
    for part in missing {
        let Some(memory) = part.block() else {
            continue;
        };
        let named = blocks.iter().filter(|block| last(block) == memory);
        // Every doorbell's block is called the same: other devices may rightly have one.
        let rightly = match part.is_bell() {
            true => doorbells(monitor)?,
            false => 0,
        };
        stale.extend(named.skip(rightly).map(|block| (*block).to_owned()));
    }
    Ok(stale)
}

/// The doorbell devices that are plugged.
fn doorbells(monitor: &mut dyn Monitor) -> Result<usize, MonitorError> {
    let mut count = 0;
    for path in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let devices = monitor.execute("qom-list", json!({"path": path}))?;
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let is_bell = |device: &&serde_json::Value| device["type"] == "child<ivshmem-doorbell>";
        count += devices.iter().filter(is_bell).count();
    }
    Ok(count)
}

/// The first column below the heading.
fn names(table: &str) -> Vec<&str> {
    let rows = table.lines().skip(1);
    rows.filter_map(|row| row.split_whitespace().next())
        .collect()
}

fn last(block: &str) -> &str {
    block.rsplit('/').next().unwrap_or(block)
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use super::super::access::Owner;
    use super::super::monitor::News;
    use super::super::parts;
    use super::*;

    /// A QEMU that has these blocks, and this many doorbells.
    struct Blocks<'a>(&'a [&'a str], usize);

    impl Monitor for Blocks<'_> {
        fn execute(
            &mut self,
            command: &str,
            arguments: serde_json::Value,
        ) -> Result<serde_json::Value, MonitorError> {
            Ok(match (command, arguments["path"].as_str()) {
                ("human-monitor-command", _) => {
                    let mut table = "  Block Name    PSize   Offset   Used\r\n".to_owned();
                    for name in self.0 {
                        table += &format!("  {name}    4 KiB  0x0000 0x1000\r\n");
                    }
                    json!(table)
                }
                ("qom-list", Some("/machine/peripheral")) => {
                    json!(vec![
                        json!({"name": "x", "type": "child<ivshmem-doorbell>"});
                        self.1
                    ])
                }
                ("qom-list", Some("/machine/peripheral-anon")) => json!([]),
                other => panic!("{other:?}"),
            })
        }

        fn add_fd(&mut self, _: BorrowedFd<'_>) -> Result<(i64, i64), MonitorError> {
            unreachable!("no descriptor is handed over here")
        }

        fn news(&mut self, _deadline: Instant) -> Result<News, MonitorError> {
            Ok(News::Nothing)
        }

        fn qemu_user(&mut self) -> Result<Option<Owner>, MonitorError> {
            Ok(None)
        }
    }

    fn left(blocks: &[&str], doorbells: usize) -> Vec<String> {
        let parts = parts::parts("a", true, 1);
        let missing: Vec<&Part> = parts.iter().collect();
        let limit = Duration::from_millis(30);
        wait_until_gone(&mut Blocks(blocks, doorbells), &missing, limit).unwrap()
    }

    #[test]
    fn only_names_that_would_come_twice_are_waited_for() {
        assert_eq!(left(&["pc.ram", "0000:00:1f.0/vnplug-ab-mem"], 0), [""; 0]);
        let old = "0000:00:02.0:00.0/vnplug-a-mem";
        assert_eq!(left(&["pc.ram", old], 0), [old]);
        let arenas = "0000:00:1e.0/vnplug-a-mem0";
        assert_eq!(left(&[arenas, "0000:00:1e.0/vnplug-a-mem1"], 0), [arenas]);
    }

    #[test]
    fn the_doorbells_of_others_are_not_waited_for() {
        let other = "0000:00:04.0/ivshmem.bar2";
        assert_eq!(left(&[other], 1), [""; 0]);
        assert_eq!(left(&[other, "0000:00:05.0/ivshmem.bar2"], 1).len(), 1);
    }
}
