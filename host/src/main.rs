//! The daemon's executable.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use vnplug_os::service::{log_line, logs_to_journal, marked};
use vnplugd::config::{Arguments, Config};
use vnplugd::daemon;

fn main() -> ExitCode {
    // The daemon runs itself to compile filters; see `vnplug_filter`.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|arg| arg == vnplug_filter::COMPILE_FILTER_ARG)
    {
        return vnplug_filter::compile_child_main();
    }
    let arguments = Arguments::parse();
    let level = if arguments.verbose {
        log::LevelFilter::Debug
    } else {
        log::LevelFilter::Info
    };
    let mut logger = env_logger::Builder::new();
    logger.filter_level(level).parse_default_env();
    if logs_to_journal() {
        logger.format(|line, record| writeln!(line, "{}", log_line(record)));
    }
    logger.init();
    let run = |config: Config| match (arguments.check, arguments.reload) {
        (true, _) => daemon::check(&config),
        (_, true) => daemon::reload(&config),
        _ => daemon::run(config, arguments.clone()),
    };
    match Config::load(arguments.clone()).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            let line = format!("vnplugd: {text}");
            eprintln!("{}", marked(log::Level::Error, &line));
            ExitCode::FAILURE
        }
    }
}
