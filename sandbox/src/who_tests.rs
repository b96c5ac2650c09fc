//! Who makes calls.

use super::*;

/// Reads to the end.
fn whole(known: &Known, mut looked: Looked) -> Arc<Who> {
    loop {
        looked = match looked {
            Looked::Whole(who) => return who,
            Looked::Part(look) => known.go_on(look).unwrap(),
        }
    }
}

/// A look at the file `exe` in this directory, in place of a process's.
fn look_in(directory: &OwnedFd, version: Version, keeps: bool) -> Look {
    let who = Who {
        pid: 0,
        started: 0,
        program: "exe".into(),
        hash: None,
        arguments: Vec::new(),
        ancestors: Vec::new(),
    };
    Look {
        thread: 0,
        exe: exe_in(directory).unwrap(),
        directory: directory.try_clone().unwrap(),
        version,
        line: Vec::new(),
        is_settled: false,
        keeps,
        who,
        hash: Sha256::new(),
        read: 0,
    }
}

#[test]
fn a_process_is_known_with_its_file_and_its_parents() {
    let known = Known::default();
    let pid = std::process::id();
    let who = whole(&known, known.look(pid, 1).unwrap());
    assert_eq!(who.pid, pid);
    assert_eq!(who.program, std::env::current_exe().unwrap());
    let text = fs::read(&who.program).unwrap();
    assert_eq!(who.hash.unwrap(), <[u8; 32]>::from(Sha256::digest(text)));
    assert!(!who.ancestors.is_empty());
    assert_eq!(who.arguments[0], std::env::args().next().unwrap());
    assert!(Arc::ptr_eq(&known.seen(pid).unwrap(), &who));
}

/// A file that is written twice within one tick, on a file system whose times are those of ticks, and what is known of it
/// after the first and the second time.
fn hashes_of_two(now: impl Fn() -> SystemTime) -> Option<[[u8; 32]; 2]> {
    let dir = vnplug_testing::TestDir::new("sandbox-racy");
    let mount = |words: &[&str]| {
        let mut command = std::process::Command::new(words[0]);
        command
            .args(&words[1..])
            .arg(&dir.0)
            .status()
            .unwrap()
            .success()
    };
    // Others have finer times since Linux 6.13.
    assert!(mount(&["mount", "-t", "ramfs", "ramfs"]));
    let directory = OwnedFd::from(File::open(&dir.0).unwrap());
    let found = (0..1000).find_map(|_| {
        let known = Known::default();
        let mut seen = Vec::new();
        for text in ["one", "two"] {
            fs::write(dir.path("exe"), text).unwrap();
            let version = version_in(&directory).unwrap();
            let is_settled = version.is_settled(now());
            let look = look_in(&directory, version, is_settled);
            let who = whole(&known, known.start(look).unwrap());
            seen.push((version, who.hash.unwrap()));
        }
        (seen[0].0 == seen[1].0).then(|| [seen[0].1, seen[1].1])
    });
    drop(directory);
    assert!(mount(&["umount"]));
    found
}

#[test]
fn a_file_that_changes_twice_in_a_tick_is_not_taken_for_the_first_one() {
    let texts = ["one", "two"].map(|text| <[u8; 32]>::from(Sha256::digest(text)));
    let found = hashes_of_two(SystemTime::now);
    assert_eq!(found.expect("two changes have one time"), texts);
    // The control: who believes that the time is long past is wrong.
    let found = hashes_of_two(|| SystemTime::now() + Duration::from_secs(9));
    assert_eq!(found.expect("two changes have one time"), [texts[0]; 2]);
}

#[test]
fn a_time_is_past_when_no_change_can_have_it() {
    let at = |seconds, nanoseconds| Version {
        device: 0,
        number: 0,
        length: 0,
        changed: (seconds, nanoseconds),
        written: (0, 0),
    };
    let now = SystemTime::UNIX_EPOCH + Duration::new(1000, 30_000_000);
    for (seconds, nanoseconds, is_settled) in [
        (1000, 10_000_000, true),
        (1000, 10_000_001, false),
        (1000, 40_000_000, false),
        (1000, 0, false),
        (998, 0, false),
        (997, 0, true),
        (-1, 5, true),
    ] {
        let version = at(seconds, nanoseconds);
        assert_eq!(version.is_settled(now), is_settled, "{version:?}");
    }
}

/// The name of what a process runs leads nowhere once its first thread has ended; its other threads wait for an answer still.
#[test]
fn a_name_that_leads_nowhere_any_more_takes_no_hash_away() {
    let dir = vnplug_testing::TestDir::new("sandbox-who");
    let bytes = vec![5; PIECE_BYTES as usize + 1];
    let hash = <[u8; 32]>::from(Sha256::digest(&bytes));
    let directory = OwnedFd::from(File::open(&dir.0).unwrap());
    let known = Known::default();
    let part = |version| match known.start(look_in(&directory, version, true)).unwrap() {
        Looked::Part(look) => look,
        Looked::Whole(who) => panic!("it is known: {who:?}"),
    };
    fs::write(dir.path("exe"), &bytes).unwrap();
    // Another name keeps the file as it is while the first goes.
    let version = version_in(&directory).unwrap();
    let Looked::Part(look) = known.go_on(part(version)).unwrap() else {
        panic!("it has two pieces")
    };
    fs::rename(dir.path("exe"), dir.path("other")).unwrap();
    // A change of name has its time, as a thread's end has none: the version that is compared is that of now.
    let look = Box::new(Look {
        version: {
            let metadata = fs::metadata(dir.path("other")).unwrap();
            Version::of(&metadata)
        },
        ..*look
    });
    let who = whole(&known, known.go_on(look).unwrap());
    assert_eq!(who.hash, Some(hash));
    // What fails is not remembered.
    fs::write(dir.path("exe"), &bytes).unwrap();
    let version = version_in(&directory).unwrap();
    let look = part(version);
    fs::write(dir.path("exe"), "").unwrap();
    assert_eq!(whole(&known, known.go_on(look).unwrap()).hash, None);
    assert!(!lock(&known.hashes).contains_key(&version));
}

#[test]
fn a_file_is_read_piece_by_piece_and_a_long_one_is_not_read() {
    let dir = vnplug_testing::TestDir::new("sandbox-who");
    let file = File::create(dir.path("exe")).unwrap();
    let directory = OwnedFd::from(File::open(&dir.0).unwrap());
    let known = Known::default();
    let start = |length: u64| {
        file.set_len(length).unwrap();
        let version = version_in(&directory).unwrap();
        known.start(look_in(&directory, version, false)).unwrap()
    };
    let mut looked = start(3 * PIECE_BYTES + 1);
    let mut pieces = 0;
    let who = loop {
        looked = match looked {
            Looked::Whole(who) => break who,
            Looked::Part(look) => known.go_on(look).unwrap(),
        };
        pieces += 1;
    };
    let zeros = vec![0; 3 * PIECE_BYTES as usize + 1];
    let hash = <[u8; 32]>::from(Sha256::digest(zeros));
    assert_eq!((who.hash, pieces), (Some(hash), 4));
    let Looked::Whole(who) = start(1 << 40) else {
        panic!("it is read")
    };
    assert_eq!(who.hash, None);
    // One that changes while it is read has none.
    let Looked::Part(look) = start(2 * PIECE_BYTES) else {
        panic!("it is known")
    };
    file.set_len(PIECE_BYTES).unwrap();
    assert_eq!(whole(&known, known.go_on(look).unwrap()).hash, None);
}
