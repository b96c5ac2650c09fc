//! The daemon's executable.

use std::process::ExitCode;

use clap::Parser;
use vnplugd::config::{Arguments, Config};

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
    env_logger::Builder::new()
        .filter_level(level)
        .parse_default_env()
        .init();
    match Config::load(arguments).and_then(vnplugd::daemon::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("vnplugd: {text}");
            ExitCode::FAILURE
        }
    }
}
