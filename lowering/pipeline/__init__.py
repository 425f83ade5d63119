"""Pipeline parallelism inside one program: schedules of microbatches over stages on devices."""
