//! What a recorder knows of the runs before it.

use vnplug_testing::until;

use super::*;

fn run(disks: &[Sim], packets: std::ops::Range<u64>) -> Status {
    let mut recorder = recorder(&settings(Format::Pcapng), sims(disks));
    take(&mut recorder, packets);
    recorder.finish()
}

fn sequences(sim: &Sim) -> Vec<u64> {
    let files = sim.files();
    let names = files
        .keys()
        .map(|path| path.file_name().unwrap().to_string_lossy());
    let names = names.filter_map(|name| SegmentName::parse(&name));
    names.map(|name| name.sequence).collect()
}

/// What was locked is gone with the directory.
#[test]
fn one_recorder_has_a_directory_that_was_made_again() {
    let place = TestDir::new("record-again");
    let disk = || real(&place).1;
    let settings = settings(Format::Pcapng);
    let mut first = Bench::on(disk(), place.0.clone(), settings.clone());
    first.chunk(true);
    first.work(0);
    std::fs::remove_dir_all(&place.0).unwrap();
    std::fs::create_dir(&place.0).unwrap();
    let buffers = (0..8).map(|id| Buffer::new(settings.chunk_bytes, id));
    let buffers = buffers.collect::<Vec<_>>();
    let start = |buffers| Recorder::start(settings.clone(), vec![real(&place)], buffers);
    let second = start(buffers).unwrap();
    // The first finds out that its segment is gone, and that the place is taken.
    for later in 0..4 {
        first.chunk(false);
        first.work(10 * later);
    }
    let paused = first.ledger.status().lanes[0].paused.clone();
    assert_eq!(paused, "another recorder is writing this recording here");
    second.finish();
    let state = || crate::record::read_state(&place.0, "t").unwrap();
    assert!(state().run.ended);
    // Now it is free, and the first has it again.
    first.work(100);
    assert_eq!(first.ledger.status().lanes[0].paused, "");
    assert!(!state().run.ended);
    let error = start(Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    // The control: it keeps what it has.
    first.chunk(true);
    first.work(200);
    assert_eq!(first.ledger.status().lanes[0].paused, "");
}

#[test]
fn counters_and_losses_of_earlier_runs_are_kept() {
    let sim = Sim::new(1 << 30);
    let first = run(std::slice::from_ref(&sim), 0..100);
    assert_eq!((first.run.number, first.earlier.runs), (1, 0));
    // The next one is killed: it has synced, and says no more.
    let mut killed = recorder(&settings(Format::Pcapng), alone(&sim));
    take(&mut killed, 100..150);
    killed.ledger().lost_in_ring(1, 2, 7, "lost", false);
    killed.flush();
    let look = || {
        let path = Path::new("/disk0").join("t.state");
        Status::from_json(&sim.files()[&path]).unwrap()
    };
    until("the second run's state is there", look, |state| {
        state.run.number == 2 && state.durable == 50 && state.lost_ring == 7
    });
    let survivor = Sim::new(1 << 30);
    for (path, content) in sim.files() {
        let mut disk = survivor.clone();
        disk.store(&path, &content).unwrap();
    }
    drop(killed);
    let third = run(std::slice::from_ref(&survivor), 150..160);
    assert_eq!((third.run.number, third.taken, third.mark), (3, 10, 10));
    let earlier = &third.earlier;
    assert_eq!((earlier.runs, earlier.cut), (2, 1));
    assert_eq!((earlier.taken, earlier.durable), (150, 150));
    assert_eq!(earlier.lost_ring, 7);
    assert_eq!((third.losses[0].run, third.losses[0].packets), (2, 7));
    assert!(third.run.ended && third.run.first_sequence > first.run.first_sequence);
}

#[test]
fn numbers_go_on_when_the_segments_were_moved_away() {
    let sim = Sim::new(1 << 30);
    run(std::slice::from_ref(&sim), 0..100);
    run(std::slice::from_ref(&sim), 100..200);
    assert_eq!(sequences(&sim), [0, 1]);
    let mut disk = sim.clone();
    for path in sim
        .files()
        .keys()
        .filter(|path| path.extension().unwrap() != "state")
    {
        disk.remove(path).unwrap();
    }
    run(std::slice::from_ref(&sim), 200..300);
    assert_eq!(sequences(&sim), [2]);
}

#[test]
fn the_latest_of_several_states_counts() {
    let sims = [Sim::new(1 << 30), Sim::new(1 << 30)];
    let run = |order: &[usize], packets| {
        let disk = |&lane: &usize| {
            let disk: Box<dyn Disk> = Box::new(sims[lane].clone());
            (PathBuf::from(format!("/disk{lane}")), disk)
        };
        let disks = order.iter().map(disk).collect();
        let mut recorder = recorder(&settings(Format::Pcapng), disks);
        take(&mut recorder, packets);
        recorder.finish()
    };
    run(&[0, 1], 0..100);
    run(&[1], 100..150);
    // One of them has not seen the second run.
    for (order, number) in [([1, 0], 3), ([0, 1], 4)] {
        let status = run(&order, 150..160);
        assert_eq!(status.run.number, number);
        assert_eq!(status.earlier.taken, 150 + 10 * (number - 3));
    }
}

#[test]
fn a_state_that_cannot_be_read_is_no_reason_to_stop() {
    let sim = Sim::new(1 << 30);
    run(std::slice::from_ref(&sim), 0..100);
    let mut disk = sim.clone();
    disk.store(Path::new("/disk0/t.state"), b"{ torn").unwrap();
    let status = run(std::slice::from_ref(&sim), 100..200);
    assert_eq!((status.run.number, status.durable), (1, 100));
    // The segments tell.
    assert_eq!(sequences(&sim), [0, 1]);
}

#[test]
fn numbers_of_more_than_ten_digits_are_refused() {
    let sim = Sim::new(1 << 30);
    let last = "/disk0/t-9999999999-20261121T134501.000000000Z.pcapng";
    sim.clone().store(Path::new(last), b"").unwrap();
    let settings = settings(Format::Pcapng);
    let refused = Recorder::start(settings, alone(&sim), Vec::new());
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("record under another name"), "{said}");
}
