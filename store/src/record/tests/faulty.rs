//! Each call of a real disk fails, in its turn.

use std::io;

use super::*;
use crate::disk::{Entry, Real, Space, Write, Written};

/// A real directory; calls from `at` on fail, `left` of them.
#[derive(Debug)]
struct Faulty {
    disk: Real,
    calls: Arc<Mutex<u64>>,
    at: u64,
    left: u64,
    errno: i32,
    /// A write of this batch failed.
    broke: bool,
}

impl Faulty {
    fn call(&mut self) -> io::Result<()> {
        let mut calls = self.calls.lock().unwrap();
        let call = *calls;
        *calls += 1;
        match call >= self.at && self.left > 0 {
            true => {
                self.left -= 1;
                Err(io::Error::from_raw_os_error(self.errno))
            }
            false => Ok(()),
        }
    }
}

impl Disk for Faulty {
    fn create(&mut self, path: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.create(path)
    }

    fn allocate(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.call()?;
        self.disk.allocate(offset, bytes)
    }

    fn start(&mut self, write: Write) {
        self.disk.start(write);
    }

    fn submit(&mut self) {
        self.disk.submit();
    }

    /// The disk has written it, and says otherwise.
    fn finish(&mut self) -> Option<Written> {
        let Some(mut written) = self.disk.finish() else {
            self.broke = false;
            return None;
        };
        if self.broke {
            written.result = Err(io::Error::from_raw_os_error(EIO));
        } else if written.result.is_ok() {
            written.result = self.call();
        }
        self.broke |= written.result.is_err();
        Some(written)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.call()?;
        self.disk.sync()
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        self.call()?;
        self.disk.truncate(bytes)
    }

    fn trim(&mut self, path: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.trim(path)
    }

    fn close(&mut self) {
        self.disk.close();
    }

    fn store(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.call()?;
        self.disk.store(path, bytes)
    }

    fn load(&mut self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        self.call()?;
        self.disk.load(path)
    }

    fn read(&mut self, path: &Path, offset: u64, into: &mut Buffer) -> io::Result<usize> {
        self.call()?;
        self.disk.read(path, offset, into)
    }

    fn date(&mut self, like: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.date(like)
    }

    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.call()?;
        self.disk.append(path, bytes)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.rename(from, to)
    }

    fn publish(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.publish(from, to)
    }

    fn remove(&mut self, path: &Path) -> io::Result<bool> {
        self.call()?;
        self.disk.remove(path)
    }

    fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.sync_dir(dir)
    }

    fn list(&mut self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.call()?;
        self.disk.list(dir)
    }

    fn space(&mut self, dir: &Path) -> io::Result<Space> {
        self.call()?;
        self.disk.space(dir)
    }

    fn lock(&mut self, path: &Path) -> io::Result<()> {
        self.call()?;
        self.disk.lock(path)
    }
}

/// Records chunks in two segments; how many calls that were, and the books.
fn record(what: &str, uring: bool, at: u64, left: u64, errno: i32) -> (u64, Status) {
    let place = TestDir::new(&format!("record-{what}"));
    let (disk, why_not) = Real::new(uring);
    assert_eq!(why_not, None, "this test needs io_uring");
    let calls = Arc::default();
    let disk = Faulty {
        disk,
        calls: Arc::clone(&calls),
        at,
        left,
        errno,
        broke: false,
    };
    let settings = Settings {
        rotate_bytes: 1 << 20,
        ..settings(Format::Pcapng)
    };
    let mut bench = Bench::on(Box::new(disk), place.0.clone(), settings);
    for chunk in 0..2 {
        bench.chunk(chunk == 0);
        (1..EACH).for_each(|_| bench.chunk(false));
        bench.work(chunk);
    }
    bench.writer.end(Instant::now() + Duration::from_secs(60));
    let status = bench.ledger.status();
    assert_eq!(status.taken, 2 * EACH * PER_CHUNK);
    assert_eq!(
        (status.buffered, status.unexplained()),
        (0, 0),
        "{at}: {status:?}"
    );
    assert_eq!(status.settled, status.taken);
    assert!(status.mark <= status.durable, "{status:?}");
    let mut image = Image::new();
    for entry in std::fs::read_dir(&place.0).unwrap() {
        let path = entry.unwrap().path();
        let content = std::fs::read(&path).unwrap();
        image.insert(path, content);
    }
    let there = packets(&image);
    assert_no_duplicates(&there);
    assert!(there.len() as u64 >= status.durable, "{at}: {status:?}");
    let calls = *calls.lock().unwrap();
    (calls, status)
}

fn every_call(what: &str, uring: bool) {
    let (calls, whole) = record(what, uring, u64::MAX, 0, EIO);
    assert_eq!((whole.durable, whole.lost()), (2 * EACH * PER_CHUNK, 0));
    assert!(calls > 20, "{calls}");
    for at in 0..calls {
        for errno in [EIO, ENOSPC] {
            let (_, once) = record(what, uring, at, 1, errno);
            assert_eq!(once.lost_disk, 0, "{at}: {once:?}");
            assert!(once.lost_unknown <= 2 * PER_CHUNK, "{at}: {once:?}");
        }
        let (_, for_ever) = record(what, uring, at, u64::MAX, EIO);
        assert_eq!(for_ever.lost() + for_ever.durable, for_ever.taken);
    }
}

/// Chunks of a segment, which come together: so many that several are under way.
const EACH: u64 = 7;

#[test]
fn every_call_of_a_real_disk_may_fail_with_io_uring() {
    every_call("uring", true);
}

#[test]
fn every_call_of_a_real_disk_may_fail_with_pwrite() {
    every_call("pwrite", false);
}
